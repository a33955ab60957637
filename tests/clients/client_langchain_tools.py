"""`langchain-openai`: a tool loop, structured answers and several turns, by the chat route and the responses route."""

import sys
from importlib.metadata import version

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

SAID = "All is done."


@tool
def weather(city: str) -> str:
    """A forecast."""
    return f"Sunny in {city}."


class Person(BaseModel):
    """A person."""

    age: int = Field(ge=0, le=99)


for options in (
    {},
    {"use_responses_api": True},
    {"use_responses_api": True, "use_previous_response_id": True},
    {"use_responses_api": True, "truncation": "auto", "output_version": "responses/v1"},
):
    model = ChatOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", model="gpt-4o-mini", max_tokens=200, **options)
    bound = model.bind_tools([weather])
    turns = [("human", "What will the weather be in Paris?")]
    called = bound.invoke(turns)
    (call,) = called.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Paris"}), options
    turns += [called, weather.invoke(call)]
    answer = bound.invoke(turns)
    assert answer.text == SAID, answer
    assert model.invoke([*turns, answer, ("human", "Thank you.")]).text == SAID
    assert "".join(piece.text for piece in model.stream("What is 2 + 2?")) == SAID
    for method in ("json_schema", "function_calling"):
        made = model.with_structured_output(Person, method=method).invoke("Invent a person.")
        assert 0 <= made.age <= 99, (options, method)
print(f"langchain-openai {version('langchain-openai')}")
