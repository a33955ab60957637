"""The `anthropic` package: messages, stream, counts, threads, tool runner, errors."""

import re
import sys
from typing import Annotated

import anthropic
from anthropic import Anthropic, BadRequestError, NotFoundError, beta_tool
from anthropic.types import Message
from pydantic import Field

client = Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
MODEL = "claude-opus-4-8"
ASKED = [{"role": "user", "content": "What is 2 + 2?"}]

message = client.messages.create(model=MODEL, max_tokens=60, messages=ASKED)
Message.model_validate(message.model_dump(mode="json", exclude_unset=True))
assert "4" in message.content[0].text and message.stop_reason == "end_turn", message

with client.messages.stream(model=MODEL, max_tokens=60, messages=ASKED) as stream:
    assert "".join(stream.text_stream) == message.content[0].text
    final = stream.get_final_message()
assert final.usage.output_tokens == message.usage.output_tokens
total = message.usage.input_tokens + message.usage.cache_read_input_tokens
assert final.usage.input_tokens + final.usage.cache_read_input_tokens == total

system = [{"type": "text", "text": "You are brief.", "cache_control": {"type": "ephemeral"}}]
turns = [*ASKED, {"role": "assistant", "content": message.content}, {"role": "user", "content": "And 3 + 3?"}]
assert client.messages.create(model=MODEL, max_tokens=20, system=system, messages=turns).content
counted = client.messages.count_tokens(model=MODEL, messages=ASKED)
assert counted.input_tokens == total
stopped = client.messages.create(model=MODEL, max_tokens=60, messages=ASKED, stop_sequences=["4"])
assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "4")

FOLLOWING = {"role": "user", "content": "And 3 + 3?"}
thread = client.beta.messages.thread(model=MODEL, max_tokens=40, system="You are brief.")
replies = [thread.send(turn) for turn in (*ASKED, FOLLOWING)]
turns = [*ASKED, {"role": "assistant", "content": replies[0].content[0].text}, FOLLOWING]
whole = client.messages.create(model=MODEL, max_tokens=40, system="You are brief.", messages=turns)
assert replies[1].content[0].text == whole.content[0].text and thread.previous_message_id == replies[1].id

tooled = Anthropic(base_url=sys.argv[2], api_key="none", max_retries=0)
name = tooled.models.list().data[0].id
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
TOOLS = [{"name": "weather", "description": "A forecast.", "input_schema": SCHEMA}]
turns = [{"role": "user", "content": "What will the weather be in Paris?"}]
choice = {"type": "tool", "name": "weather"}
called = tooled.messages.create(model=name, max_tokens=200, messages=turns, tools=TOOLS, tool_choice=choice)
Message.model_validate(called.model_dump(mode="json", exclude_unset=True))
(use,) = called.content
assert (called.stop_reason, use.type, use.name) == ("tool_use", "tool_use", "weather") and "city" in use.input, called
with tooled.messages.stream(model=name, max_tokens=200, messages=turns, tools=TOOLS, tool_choice=choice) as stream:
    assert stream.get_final_message().content[0].input == use.input
turns += [
    {"role": "assistant", "content": called.content},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "Sunny, 25 degrees."}]},
]
assert tooled.messages.create(model=name, max_tokens=30, messages=turns, tools=TOOLS).content

cities = []


@beta_tool
def weather(city: Annotated[str, Field(max_length=20)]) -> str:
    """A forecast."""
    cities.append(city)
    return "Sunny, 25 degrees."


runner = tooled.beta.messages.tool_runner(
    model=name,
    max_tokens=200,
    tools=[weather],
    tool_choice={"type": "any", "disable_parallel_tool_use": True},
    messages=turns[:1],
    max_iterations=2,
)
assert [reply.stop_reason for reply in runner] == ["tool_use"] * 2 and len(cities) == 2

refused = None
try:
    client.messages.create(model=name, max_tokens=5, messages=ASKED, extra_body={"temperature": 50})
except BadRequestError as error:
    refused = error
assert refused is not None and refused.type == "invalid_request_error" and refused.request_id
refused = None
try:
    client.messages.create(model=name, max_tokens=5, messages=[{"role": "user", "content": "word " * 20_000}])
except BadRequestError as error:
    refused = error
assert re.fullmatch(r"prompt is too long: \d+ tokens > \d+ maximum", refused.api_message), refused
lost = None
try:
    on = {"type": "continue", "previous_message_id": "msg_none"}
    client.beta.messages.create(model=name, max_tokens=5, messages=ASKED, thread=on)
except NotFoundError as error:
    lost = error.error_code
assert lost == "thread_not_found", lost
assert client.messages.create(model="other", max_tokens=5, messages=ASKED).content
print(f"anthropic {anthropic.__version__}")
