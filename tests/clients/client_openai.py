"""The `openai` package: chat, stream, completions, responses, models, errors. Its own types check every answer."""

import sys

from openai import BadRequestError, NotFoundError, OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
MODEL = "smollm2-135m"
ASKED = [{"role": "user", "content": "What is 2 + 2?"}]


def strict(kind, answer):
    """Validate by the package's own type: what it parses answers with does not."""
    return kind.model_validate(answer.model_dump(mode="json", exclude_unset=True), strict=False)


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

for wrong, kind in (
    ({"model": "other"}, NotFoundError),
    ({"temperature": 50}, BadRequestError),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}, BadRequestError),
):
    named = None
    try:
        client.chat.completions.create(**{"model": MODEL, "messages": ASKED, "max_tokens": 2, **wrong})
    except kind as error:
        named = error.param
    assert named == next(iter(wrong)), named
