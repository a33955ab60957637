"""A call in each of mlx-lm's tool formats."""

from importlib import import_module

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
QWEN = (
    "\n<function=weather>\n<parameter=city>\nSan José\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n"
)
GLM = "weather\n<arg_key>city</arg_key>\n<arg_value>San José</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n"
K2 = 'functions.weather:0<|tool_call_argument_begin|>{"city": "San José", "days": 2}'
K3_ARGUMENT = '<|open|>argument key="{}" type="{}"<|sep|>{}<|close|>argument<|sep|>'
K3_ARGUMENTS = K3_ARGUMENT.format("city", "string", "San José") + K3_ARGUMENT.format("days", "number", "2")
ATEM = '<atem:parameter name="city">San José</atem:parameter><atem:parameter name="days">2</atem:parameter>'
LONGCAT = "<longcat_arg_key>{}</longcat_arg_key><longcat_arg_value>{}</longcat_arg_value>"
CALLS = {
    "function_gemma": "call:weather{city:<escape>San José<escape>,days:2}",
    "gemma4": 'call:weather{city:<|"|>San José<|"|>,days:2}',
    "glm47": GLM,
    "json_tools": '\n{"name": "weather", "arguments": {"city": "San José", "days": 2}}\n',
    "kimi_k2": f"<|tool_call_begin|>{K2}<|tool_call_end|>",
    "kimi_k3": f'<|open|>call tool="weather" index="1"<|sep|>{K3_ARGUMENTS}<|close|>call<|sep|>',
    "laguna": GLM,
    "longcat": "weather\n" + LONGCAT.format("city", "San José") + LONGCAT.format("days", "2"),
    "minicpm5": '"weather"><param name="city">San José</param><param name="days">2</param>',
    "minimax_m2": '\n<invoke name="weather">\n<parameter name="city">San José</parameter>'
    '\n<parameter name="days">2</parameter>\n</invoke>\n',
    "mistral": 'weather[ARGS]{"city": "San José", "days": 2}',
    "muse_spark": f'<atem:invoke name="weather">{ATEM}</atem:invoke>',
    "pythonic": '[weather(city="San José", days=2)]',
    "qwen3_coder": QWEN,
}
"""A call in every format, without its markers."""
WANTED = {"city": "San José", "days": 2}


def marked(parser: str, call: str) -> str:
    module = import_module(f"mlx_lm.tool_parsers.{parser}")
    return f"{module.tool_call_start}{call}{module.tool_call_end}"
