"""`instructor`: structured answers by tools, by JSON and by the responses route, with several turns and streamed."""

import sys
from importlib.metadata import version

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=10)
    age: int = Field(ge=0, le=99)


client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
turns = [
    {"role": "user", "content": "Invent a person."},
    {"role": "assistant", "content": "Ada, 36."},
    {"role": "user", "content": "Another one."},
]
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    made = instructor.from_openai(client, mode=mode).chat.completions.create(
        model="gpt-4o-mini", messages=turns, response_model=Person, max_tokens=200, max_retries=0
    )
    assert isinstance(made, Person), mode
for mode in (instructor.Mode.RESPONSES_TOOLS,):
    made = instructor.from_openai(client, mode=mode).responses.create(
        model="gpt-4o-mini", input=turns, response_model=Person, max_output_tokens=200, max_retries=0
    )
    assert isinstance(made, Person), mode
*_, last = instructor.from_openai(client, mode=instructor.Mode.TOOLS).chat.completions.create_partial(
    model="gpt-4o-mini", messages=turns[:1], response_model=Person, max_tokens=200, max_retries=0
)
assert 0 <= last.age <= 99
print(f"instructor {version('instructor')}")
