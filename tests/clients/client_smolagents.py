"""`smolagents`: an agent that calls a tool, with its final answer as a tool too; answers, streams, formats of the model
alone."""

import sys
from importlib.metadata import version

from smolagents import OpenAIServerModel, ToolCallingAgent, tool
from smolagents.models import ChatMessage, MessageRole

SAID = "All is done."
model = OpenAIServerModel("gpt-4o-mini", api_base=f"{sys.argv[1]}/v1", api_key="none", max_tokens=200)
asked = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": "What is 2 + 2?"}])]
answer = model.generate(asked)
assert answer.content == SAID
assert "".join(delta.content or "" for delta in model.generate_stream(asked)) == SAID
following = ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": "And 3 + 3?"}])
assert model.generate([*asked, answer, following]).content == SAID


@tool
def weather(city: str) -> str:
    """A forecast.

    Args:
        city: Where.
    """
    return f"Sunny in {city}."


# Calls are forced, and the final answer is one: the scripted model says that at once.
agent = ToolCallingAgent(tools=[weather], model=model, max_steps=2, verbosity_level=0)
assert agent.run("Where is it sunny?") == "Paris"
print(f"smolagents {version('smolagents')}")
