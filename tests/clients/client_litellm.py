"""`litellm`: OpenAI's chat route and Anthropic's messages through one interface."""

import sys

import litellm

ASKED = [{"role": "user", "content": "What is 2 + 2?"}]
openai = {"model": "openai/smollm2-135m", "api_base": f"{sys.argv[1]}/v1", "api_key": "none", "max_tokens": 40}
answer = litellm.completion(messages=ASKED, **openai)
text = answer.choices[0].message.content
assert "4" in text and answer.usage.completion_tokens > 0
streamed = litellm.completion(messages=ASKED, stream=True, **openai)
assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text
anthropic = {"model": "anthropic/claude-opus-4-8", "api_base": sys.argv[1], "api_key": "none", "max_tokens": 60}
assert "4" in litellm.completion(messages=ASKED, **anthropic).choices[0].message.content
