"""`pydantic-ai`: OpenAI's chat and responses routes and Anthropic's messages: answers, streams, tools, structured answers,
several turns."""

import asyncio
import sys
from importlib.metadata import version

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

SAID = "All is done."
openai = OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none")
models = [
    OpenAIChatModel("gpt-4o-mini", provider=openai),
    OpenAIResponsesModel("gpt-4o-mini", provider=openai),
    AnthropicModel("claude-opus-4-8", provider=AnthropicProvider(base_url=sys.argv[1], api_key="none")),
]


class Person(BaseModel):
    age: int = Field(ge=0, le=99)


async def main() -> None:
    for model in models:
        cities = []

        def weather(city: str, cities: list = cities) -> str:
            """A forecast."""
            cities.append(city)
            return "Sunny, 25 degrees."

        agent = Agent(model, instructions="Be brief.", model_settings={"max_tokens": 100})
        first = await agent.run("What is 2 + 2?")
        assert first.output == SAID
        again = await agent.run("And 3 + 3?", message_history=first.all_messages())
        assert again.output == SAID
        async with agent.run_stream("What is 2 + 2?") as streamed:
            assert await streamed.get_output() == SAID

        @agent.tool_plain(name="weather")
        def forecast(city: str) -> str:
            """A forecast."""
            return weather(city)

        called = await agent.run("What will the weather be in Paris?")
        assert (called.output, cities) == (SAID, ["Paris"]), model
        on = await agent.run("And tomorrow?", message_history=called.all_messages())
        assert (on.output, len(cities)) == (SAID, 2)
        for output in (Person, NativeOutput(Person)):
            if isinstance(output, NativeOutput) and isinstance(model, AnthropicModel):
                continue
            made = await Agent(model, output_type=output, model_settings={"max_tokens": 200}).run("Invent a person.")
            assert 0 <= made.output.age <= 99, model


asyncio.run(main())
print(f"pydantic-ai {version('pydantic-ai-slim')}")
