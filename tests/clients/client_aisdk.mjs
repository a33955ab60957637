// The AI SDK with its providers for OpenAI (responses, with their default settings), OpenAI's chat route and Anthropic:
// an answer, a stream, a call with its result, an object, several turns.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [address] = process.argv.slice(2);
const SAID = "All is done.";
const bodies = [];
const watched = (url, options) => {
  bodies.push(options.body);
  return fetch(url, options);
};
const providers = {
  openai: (url) => createOpenAI({ baseURL: `${url}/v1`, apiKey: "none", fetch: watched }),
  compatible: (url) => createOpenAICompatible({ name: "redraft", baseURL: `${url}/v1`, supportsStructuredOutputs: true }),
  anthropic: (url) => createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" }),
};
const question = { role: "user", content: "What is 2 + 2?" };
const limits = { maxOutputTokens: 60, maxRetries: 0, temperature: 0 };

for (const [name, provider] of Object.entries(providers)) {
  const model = provider(address)("gpt-4o-mini");
  const answer = await generateText({ model, messages: [question], ...limits });
  assert.equal(answer.text, SAID, name);
  assert(answer.usage.outputTokens > 0);

  const streamed = streamText({ model, messages: [question], ...limits });
  let text = "";
  for await (const piece of streamed.textStream) text += piece;
  assert.equal(text, answer.text, name);

  // Of OpenAI's provider the second turn refers to the first answer by its id.
  const said = (await streamed.response).messages;
  const next = await generateText({
    model,
    messages: [question, ...said, { role: "user", content: "And 3 + 3?" }],
    ...limits,
  });
  assert.equal(next.text, SAID, name);
  if (name === "openai") {
    assert(bodies.at(-1).includes("item_reference"), bodies.at(-1));
  }

  const schema = z.object({ name: z.string().max(10), age: z.number().int().min(0).max(99) });
  const made = await generateObject({ model, schema, prompt: "Invent a person.", ...limits, maxOutputTokens: 200 });
  assert(Number.isInteger(made.object.age), name);

  const asked = [];
  const tools = {
    weather: tool({
      description: "A forecast.",
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => {
        asked.push(city);
        return "Sunny, 25 degrees.";
      },
    }),
  };
  const prompt = "What will the weather be in Paris?";
  const called = await generateText({ model, tools, stopWhen: stepCountIs(3), prompt, ...limits });
  assert.deepEqual([called.steps.length, asked, called.text], [2, ["Paris"], SAID], name);
  const calling = streamText({ model, tools, stopWhen: stepCountIs(3), prompt, ...limits });
  assert.equal(await calling.text, SAID, name);
  assert.deepEqual(asked, ["Paris", "Paris"], name);
}

const version = (name) => JSON.parse(readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url), "utf8")).version;
const names = ["ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic"];
console.log(names.map((name) => `${name} ${version(name)}`).join(", "));
