// LibreChat's engine (@librechat/agents), set up as LibreChat sets it up for a server of one's own: streamed answers, a tool,
// several turns, titles by each of its methods; by the chat route and by the responses route.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

// As LibreChat's own server loads them.
const require = createRequire(import.meta.url);
const { GraphEvents, ModelEndHandler, Providers, Run, TitleMethod, ToolEndHandler, createContentAggregator } = require("@librechat/agents");
const { AIMessage, HumanMessage } = require("@langchain/core/messages");
const { tool } = require("@langchain/core/tools");

const [address] = process.argv.slice(2);
const SAID = "All is done.";
const CITY = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const GATHERED = ["ON_RUN_STEP", "ON_RUN_STEP_DELTA", "ON_RUN_STEP_COMPLETED", "ON_MESSAGE_DELTA", "ON_REASONING_DELTA"];

for (const useResponsesApi of [false, true]) {
  const paths = new Set();
  const client = {
    model: "gpt-4o-mini",
    user: "5e551011000040008000abcd",
    apiKey: "none",
    useResponsesApi,
    configuration: {
      baseURL: `${address}/v1`,
      fetch: (url, options) => {
        paths.add(new URL(url).pathname);
        return fetch(url, options);
      },
    },
  };
  const asked = [];
  const forecast = async ({ city }) => {
    asked.push(city);
    return `Sunny in ${city}.`;
  };
  const weather = tool(forecast, { name: "weather", description: "A forecast.", schema: CITY });

  const turn = async (messages, tools) => {
    const usage = [];
    const { contentParts, aggregateContent } = createContentAggregator();
    const gathered = GATHERED.map((name) => [GraphEvents[name], { handle: (event, data) => aggregateContent({ event, data }) }]);
    const llmConfig = { provider: Providers.OPENAI, streaming: true, streamUsage: true, temperature: 0.5, topP: 0.9, maxTokens: 200 };
    const run = await Run.create({
      runId: crypto.randomUUID(),
      graphConfig: { type: "standard", llmConfig: { ...llmConfig, ...client }, instructions: "You are brief.", tools },
      returnContent: true,
      customHandlers: {
        [GraphEvents.TOOL_END]: new ToolEndHandler(),
        [GraphEvents.CHAT_MODEL_END]: new ModelEndHandler(usage),
        ...Object.fromEntries(gathered),
      },
    });
    const configurable = { thread_id: "a", user_id: client.user };
    await run.processStream({ messages }, { configurable, streamMode: "values", version: "v2" });
    assert(usage.length > 0 && usage.every((each) => each.input_tokens > 0 && each.output_tokens > 0), JSON.stringify(usage));
    // Holes are left where a message said nothing before its call.
    return { run, parts: contentParts.filter(Boolean), said: run.getRunMessages(), requests: usage.length };
  };

  const question = new HumanMessage("What is 2 + 2?");
  const { run, parts } = await turn([question], []);
  assert.deepEqual(parts, [{ type: "text", text: SAID }]);

  // LibreChat keeps an answer's text, and sends it in the turns that follow.
  const following = [question, new AIMessage(SAID), new HumanMessage("What will the weather be in Paris?")];
  const called = await turn(following, [weather]);
  const [call, answer] = called.parts;
  assert.deepEqual([asked, called.requests, answer.text], [["Paris"], 2, SAID]);
  assert.deepEqual([call.tool_call.name, call.tool_call.output], ["weather", "Sunny in Paris."]);
  const later = await turn([...following, ...called.said, new HumanMessage("Thank you.")], []);
  assert.deepEqual(later.parts, [{ type: "text", text: SAID }]);

  for (const titleMethod of Object.values(TitleMethod)) {
    const { title } = await run.generateTitle({
      provider: Providers.OPENAI,
      inputText: question.content,
      contentParts: parts,
      titleMethod,
      clientOptions: client,
      chainOptions: { configurable: { thread_id: "a", user_id: client.user } },
    });
    // The scripted model's word for every string that a schema asks for.
    assert.equal(title, titleMethod === TitleMethod.COMPLETION ? SAID : "Paris");
  }
  assert.deepEqual([...paths], [useResponsesApi ? "/v1/responses" : "/v1/chat/completions"]);
}

const version = JSON.parse(readFileSync(new URL("node_modules/@librechat/agents/package.json", import.meta.url), "utf8")).version;
console.log(`@librechat/agents ${version}`);
