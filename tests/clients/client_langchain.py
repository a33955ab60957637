"""`langchain-openai`: an answer, a stream, a batch."""

import sys

from langchain_openai import ChatOpenAI

model = ChatOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", model="gpt-4o-mini", temperature=0, max_tokens=40)
answer = model.invoke("What is 2 + 2?")
assert "4" in answer.content and answer.usage_metadata["output_tokens"] > 0
assert "".join(chunk.content for chunk in model.stream("What is 2 + 2?")) == answer.content
assert [each.content for each in model.batch(["What is 2 + 2?"] * 3)] == [answer.content] * 3
turns = [("system", "You are brief."), ("human", "What is 2 + 2?"), ("ai", "4."), ("human", "And 3 + 3?")]
assert model.invoke(turns).content
