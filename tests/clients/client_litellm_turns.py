"""`litellm` with its own messages sent back: a call and its result, by the chat route, the responses route and Anthropic's."""

import os
import sys
from importlib.metadata import version

# It would fetch lists of models from elsewhere.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from pydantic import BaseModel, Field

SAID = "All is done."
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "A forecast.", "parameters": PARAMETERS}}
routes = [
    {"model": "openai/gpt-4o-mini", "api_base": f"{sys.argv[1]}/v1"},
    {"model": "anthropic/claude-opus-4-8", "api_base": sys.argv[1]},
]


class Person(BaseModel):
    age: int = Field(ge=0, le=99)


for route in routes:
    more = {**route, "api_key": "none", "max_tokens": 200}
    turns = [{"role": "user", "content": "What will the weather be in Paris?"}]
    called = litellm.completion(messages=turns, tools=[TOOL], **more).choices[0].message
    (call,) = called.tool_calls
    assert (call.function.name, call.function.arguments.replace(" ", "")) == ("weather", '{"city":"Paris"}')
    turns += [called, {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}]
    answer = litellm.completion(messages=turns, tools=[TOOL], **more).choices[0].message
    assert answer.content == SAID, answer
    # Everything that litellm puts into messages of its own goes back.
    turns += [answer.model_dump(), {"role": "user", "content": "Thank you."}]
    assert litellm.completion(messages=turns, **more).choices[0].message.content == SAID
    streamed = litellm.completion(messages=turns, stream=True, **more)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == SAID
    made = litellm.completion(messages=turns[:1], response_format=Person, **more).choices[0].message.content
    assert 0 <= Person.model_validate_json(made).age <= 99
first = litellm.responses(input="What is 2 + 2?", **routes[0], api_key="none", max_output_tokens=100)
second = litellm.responses(
    input="And 3 + 3?", previous_response_id=first.id, **routes[0], api_key="none", max_output_tokens=100
)
assert second.output[0].content[0].text == SAID
print(f"litellm {version('litellm')}")
