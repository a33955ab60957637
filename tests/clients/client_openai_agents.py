"""`openai-agents`: runs by the responses route and by the chat route; conversations kept by the server; tools; structured
answers."""

import asyncio
import sys
from importlib.metadata import version

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

SAID = "All is done."
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
settings = ModelSettings(max_tokens=100, truncation="auto")
cities = []


@function_tool
def weather(city: str) -> str:
    """A forecast."""
    cities.append(city)
    return "Sunny, 25 degrees."


class Person(BaseModel):
    age: int = Field(ge=0, le=99)


async def main() -> None:
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        agent = Agent("guide", instructions="Be brief.", model=kind("gpt-4o-mini", client), model_settings=settings)
        first = await Runner.run(agent, "What is 2 + 2?")
        assert first.final_output == SAID, first
        again = await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "And 3 + 3?"}])
        assert again.final_output == SAID
        streamed = Runner.run_streamed(agent, "What is 2 + 2?")
        assert [event.type async for event in streamed.stream_events()] and streamed.final_output == SAID
        cities.clear()
        called = await Runner.run(agent.clone(tools=[weather]), "What will the weather be in Paris?")
        assert (called.final_output, cities) == (SAID, ["Paris"])
        made = await Runner.run(agent.clone(output_type=Person), "Invent a person.")
        assert 0 <= made.final_output.age <= 99
    agent = Agent("guide", model=OpenAIResponsesModel("gpt-4o-mini", client), model_settings=settings, tools=[weather])
    kept = await Runner.run(agent, "What will the weather be in Paris?", auto_previous_response_id=True)
    assert kept.final_output == SAID
    following = await Runner.run(agent, "And tomorrow?", previous_response_id=kept.last_response_id)
    assert following.final_output == SAID and len(following.raw_responses) == 2
    assert following.raw_responses[0].usage.input_tokens > kept.raw_responses[-1].usage.input_tokens


asyncio.run(main())
print(f"openai-agents {version('openai-agents')}")
