// OpenAI's and Anthropic's libraries for Node.js: answers, streams, structured answers, conversations by id, tool runners.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const [address] = process.argv.slice(2);
const SAID = "All is done.";
const client = new OpenAI({ baseURL: `${address}/v1`, apiKey: "none", maxRetries: 0 });
const model = "gpt-4o-mini";
const messages = [{ role: "user", content: "What is 2 + 2?" }];

const chat = await client.chat.completions.create({ model, messages, max_tokens: 40 });
const text = chat.choices[0].message.content;
assert.equal(text, SAID);
let streamed = "";
for await (const chunk of await client.chat.completions.create({ model, messages, max_tokens: 40, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(streamed, text);

const first = await client.responses.create({ model, input: messages, max_output_tokens: 40 });
assert.equal(first.output_text, text);
assert.equal(first.store, true);
const second = await client.responses.create({
  model,
  input: "And 3 + 3?",
  previous_response_id: first.id,
  max_output_tokens: 40,
});
const whole = await client.responses.create({
  model,
  input: [...messages, ...first.output, { role: "user", content: "And 3 + 3?" }],
  max_output_tokens: 40,
});
assert.equal(second.output_text, whole.output_text);
assert.equal((await client.responses.retrieve(first.id)).output_text, text);
await client.responses.delete(first.id);
await assert.rejects(client.responses.retrieve(first.id), OpenAI.NotFoundError);

const schema = {
  type: "object",
  properties: { age: { type: "integer", minimum: 0, maximum: 99 } },
  required: ["age"],
  additionalProperties: false,
};
const made = await client.responses.create({
  model,
  input: "Invent a person.",
  text: { format: { type: "json_schema", name: "person", strict: true, schema } },
  max_output_tokens: 100,
});
assert(Number.isInteger(JSON.parse(made.output_text).age));

const anthropic = new Anthropic({ baseURL: address, apiKey: "none", maxRetries: 0 });
const message = await anthropic.messages.create({ model, max_tokens: 40, messages });
assert.equal(message.content[0].text, SAID);
assert(message._request_id);
const stream = anthropic.messages.stream({ model, max_tokens: 40, messages });
assert.equal((await stream.finalMessage()).content[0].text, message.content[0].text);
await assert.rejects(
  anthropic.messages.create({ model, max_tokens: 40, messages: [{ role: "user", content: "word ".repeat(40_000) }] }),
  (error) => error.type === "invalid_request_error" && /prompt is too long: \d+ tokens > \d+ maximum/.test(error.message),
);

const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const question = [{ role: "user", content: "What will the weather be in Paris?" }];
const runner = client.chat.completions.runTools({
  model,
  messages: question,
  tools: [
    {
      type: "function",
      function: { name: "weather", parameters, parse: JSON.parse, function: ({ city }) => `Sunny in ${city}.` },
    },
  ],
});
assert.equal(await runner.finalContent(), SAID);
assert.equal(runner.messages.find((turn) => turn.role === "tool").content, "Sunny in Paris.");

// The tool runner sends its second request on the thread of its first.
const cities = [];
const last = await anthropic.beta.messages.toolRunner({
  model,
  max_tokens: 100,
  messages: question,
  tools: [
    {
      type: "custom",
      name: "weather",
      input_schema: parameters,
      parse: (input) => input,
      run: ({ city }) => {
        cities.push(city);
        return "Sunny.";
      },
    },
  ],
});
assert.deepEqual([cities, last.content[0].text], [["Paris"], SAID]);

const version = (package_) => JSON.parse(readFileSync(new URL(`node_modules/${package_}/package.json`, import.meta.url), "utf8")).version;
console.log(["openai", "@anthropic-ai/sdk"].map((each) => `${each} ${version(each)}`).join(", "));
