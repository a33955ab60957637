"""LlamaIndex with `llama-index-llms-openai-like`: an answer, a stream, several turns, a call with its result, a structured
answer."""

import sys
from importlib.metadata import version

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

SAID = "All is done."
model = OpenAILike(
    model="gpt-4o-mini",
    api_base=f"{sys.argv[1]}/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    max_tokens=200,
    max_retries=0,
)
turns = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="What is 2 + 2?")]
answer = model.chat(turns)
assert answer.message.content == SAID
assert "".join(part.delta or "" for part in model.stream_chat(turns)) == SAID
assert model.chat([*turns, answer.message, ChatMessage(role="user", content="And 3 + 3?")]).message.content == SAID


def weather(city: str) -> str:
    """A forecast."""
    return f"Sunny in {city}."


tool = FunctionTool.from_defaults(weather)
history = [ChatMessage(role="user", content="What will the weather be in Paris?")]
called = model.chat_with_tools([tool], chat_history=history)
(call,) = model.get_tool_calls_from_response(called)
assert (call.tool_name, call.tool_kwargs) == ("weather", {"city": "Paris"})
result = ChatMessage(role="tool", content=weather(**call.tool_kwargs), additional_kwargs={"tool_call_id": call.tool_id})
after = model.chat_with_tools([tool], chat_history=[*history, called.message, result])
assert after.message.content == SAID


class Person(BaseModel):
    age: int = Field(ge=0, le=99)


made = model.as_structured_llm(Person).chat([ChatMessage(role="user", content="Invent a person.")])
assert 0 <= made.raw.age <= 99
print(f"llama-index-core {version('llama-index-core')}")
