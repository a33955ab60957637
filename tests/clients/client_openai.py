"""The `openai` package: every route, formats, tools, errors. Its own types check every answer."""

import json
import re
import sys

import openai
from openai import BadRequestError, NotFoundError, OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from pydantic import BaseModel

client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
MODEL = "smollm2-135m"
ASKED = [{"role": "user", "content": "What is 2 + 2?"}]


def strict(kind, answer):
    """Validate by the package's own type: what it parses answers with does not."""
    return kind.model_validate(answer.model_dump(mode="json", by_alias=True, exclude_unset=True))


assert MODEL in [model.id for model in client.models.list()]
assert client.models.retrieve("gpt-4o-mini").id == "gpt-4o-mini"

whole = strict(ChatCompletion, client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=40))
text = whole.choices[0].message.content
assert "4" in text, text
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

chunks = [
    strict(ChatCompletionChunk, chunk)
    for chunk in client.chat.completions.create(
        model="gpt-4o-mini",
        messages=[{"role": "user", "content": [{"type": "text", "text": "What is 2 + 2?"}]}],
        max_completion_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=3,
    )
]
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
logprobs = [
    each
    for chunk in chunks
    if chunk.choices and chunk.choices[0].logprobs
    for each in chunk.choices[0].logprobs.content
]
assert "".join(each.token for each in logprobs) == text
assert all(len(each.top_logprobs) == 3 for each in logprobs)

with client.chat.completions.stream(model=MODEL, messages=ASKED, max_tokens=40) as stream:
    stream.until_done()
    assert stream.get_final_completion().choices[0].message.content == text

several = client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=5, n=3, temperature=1, seed=1)
assert len(strict(ChatCompletion, several).choices) == 3

completion = strict(
    Completion, client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8, logprobs=2)
)
assert "".join(completion.choices[0].logprobs.tokens) == completion.choices[0].text
pieces = list(client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8, stream=True))
assert "".join(piece.choices[0].text for piece in pieces) == completion.choices[0].text
# The package's type has no null for finish_reason, which OpenAI itself sends until the last piece.
strict(Completion, pieces[-1])

response = strict(
    Response, client.responses.create(model=MODEL, input="What is 2 + 2?", max_output_tokens=60, store=False)
)
assert response.output_text == text and response.status == "completed"
with client.responses.stream(model=MODEL, input="What is 2 + 2?", max_output_tokens=60) as stream:
    kinds = [event.type for event in stream]
    assert strict(Response, stream.get_final_response()).output_text == text
assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
asked = [{"role": "user", "content": "What is 2 + 2?"}, *response.output, {"role": "user", "content": "And 3 + 3?"}]
assert client.responses.create(model=MODEL, input=asked, max_output_tokens=20).output_text

first = client.responses.create(model=MODEL, input="What is 2 + 2?", max_output_tokens=60)
following = {"model": MODEL, "max_output_tokens": 20}
second = client.responses.create(input="And 3 + 3?", previous_response_id=first.id, **following)
asked = [{"role": "user", "content": "What is 2 + 2?"}, *first.output, {"role": "user", "content": "And 3 + 3?"}]
assert first.store and client.responses.create(input=asked, **following).output_text == second.output_text
asked[1] = {"type": "item_reference", "id": first.output[0].id}
assert client.responses.create(input=asked, **following).output_text == second.output_text
assert strict(Response, client.responses.retrieve(first.id)) == first
client.responses.delete(first.id)
gone = None
try:
    client.responses.create(input="And 3 + 3?", previous_response_id=first.id, **following)
except NotFoundError as error:
    gone = error.code
assert gone == "previous_response_not_found", gone

# ------------------------------------------------------------------------------------------------------------- formats


class Person(BaseModel):
    name: str
    age: int
    city: str


INVENT = [{"role": "user", "content": "Invent a person."}]
parsed = client.chat.completions.parse(model=MODEL, messages=INVENT, response_format=Person, max_tokens=200)
assert isinstance(parsed.choices[0].message.parsed, Person), parsed
plain = client.chat.completions.parse(
    model=MODEL, messages=INVENT, response_format=Person, max_tokens=200, extra_body={"num_draft_tokens": 0}
)
assert plain.choices[0].message.content == parsed.choices[0].message.content
assert plain.timings["draft_n"] == 0 < parsed.timings["draft_n_accepted"]
with client.chat.completions.stream(model=MODEL, messages=INVENT, response_format=Person, max_tokens=200) as stream:
    stream.until_done()
    assert stream.get_final_completion().choices[0].message.parsed == parsed.choices[0].message.parsed
made = client.responses.parse(model=MODEL, input="Invent a person.", text_format=Person, max_output_tokens=200)
assert isinstance(strict(Response, made) and made.output_parsed, Person)
free = client.chat.completions.create(
    model=MODEL, messages=INVENT, response_format={"type": "json_object"}, max_tokens=300, temperature=0.7, seed=1
)
assert free.choices[0].finish_reason == "length" or json.loads(free.choices[0].message.content) is not None
for outputs, pattern in (
    ({"choice": ["red", "green"]}, "red|green"),
    ({"regex": "[0-9]{3}-[0-9]{4}"}, "[0-9]{3}-[0-9]{4}"),
    ({"grammar": 'start: "x" /[ab]+/ "y"'}, "x[ab]+y"),
):
    answer = client.chat.completions.create(
        model=MODEL, messages=INVENT, max_tokens=30, extra_body={"structured_outputs": outputs}
    )
    cut = answer.choices[0].finish_reason == "length"
    assert cut or re.fullmatch(pattern, answer.choices[0].message.content), answer

# --------------------------------------------------------------------------------------------------------------- tools

tooled = OpenAI(base_url=f"{sys.argv[2]}/v1", api_key="none", max_retries=0)
model = tooled.models.list().data[0].id
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "A forecast.", "parameters": PARAMETERS}}
turns = [{"role": "user", "content": "What will the weather be in Paris for 3 days?"}]
called = strict(
    ChatCompletion,
    tooled.chat.completions.create(
        model=model, messages=turns, tools=[TOOL], tool_choice="required", max_tokens=200, parallel_tool_calls=False
    ),
)
(call,) = called.choices[0].message.tool_calls
assert called.choices[0].finish_reason == "tool_calls" and call.function.name == "weather"
assert set(json.loads(call.function.arguments)) == {"city", "days"}
chunks = tooled.chat.completions.create(
    model=model,
    messages=turns,
    tools=[TOOL],
    tool_choice={"type": "function", "function": {"name": "weather"}},
    max_tokens=200,
    stream=True,
)
pieces = [piece for chunk in chunks for piece in strict(ChatCompletionChunk, chunk).choices[0].delta.tool_calls or []]
assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments
turns += [
    called.choices[0].message.model_dump(exclude_none=True),
    {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 25 degrees."},
]
assert (
    tooled.chat.completions.create(model=model, messages=turns, tools=[TOOL], max_tokens=30).choices[0].message.content
)
flat = {"type": "function", **TOOL["function"]}
response = strict(
    Response,
    tooled.responses.create(
        model=model,
        input="What will the weather be in Paris for 3 days?",
        tools=[flat],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=200,
    ),
)
(item,) = response.output
assert (item.type, item.name, item.arguments) == ("function_call", "weather", call.function.arguments)
asked = [
    {"role": "user", "content": "What will the weather be in Paris for 3 days?"},
    item,
    {"type": "function_call_output", "call_id": item.call_id, "output": "Sunny, 25 degrees."},
]
assert tooled.responses.create(model=model, input=asked, tools=[flat], max_output_tokens=30).output_text

# ------------------------------------------------------------------------------------------------------ predicted outputs

said = (
    client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=40, temperature=0).choices[0].message.content
)
predicted = client.chat.completions.create(
    model=MODEL, messages=ASKED, max_tokens=40, temperature=0, prediction={"type": "content", "content": said}
)
assert predicted.choices[0].message.content == said, predicted
known = predicted.usage.completion_tokens_details
# All but the token that ends the answer, which is no text.
assert known.accepted_prediction_tokens >= predicted.usage.completion_tokens - 1, predicted.usage
assert known.rejected_prediction_tokens == 0, predicted.usage

# ------------------------------------------------------------------------------------------- another name, and errors

raw = client.chat.completions.with_raw_response.create(model="other", messages=ASKED, max_tokens=2, extra_body={"x": 1})
assert set(raw.headers["x-redraft-ignored"].split(", ")) == {"model", "x"}, raw.headers
assert raw.parse().choices

for wrong, kind in (
    ({"temperature": 50}, BadRequestError),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}, BadRequestError),
):
    named = None
    try:
        client.chat.completions.create(**{"model": MODEL, "messages": ASKED, "max_tokens": 2, **wrong})
    except kind as error:
        named = error.param
    assert named == next(iter(wrong)), named
print(f"openai {openai.__version__}")
