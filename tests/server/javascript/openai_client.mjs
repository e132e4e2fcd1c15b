// OpenAI's own client for JavaScript against a server: node openai_client.mjs BASE_URL
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Say something." }];
const plain = { model: "tiny", messages, max_tokens: 12, seed: 5 };
const tools = [{
  type: "function",
  function: {
    name: "set_light", description: "Switch a light.", strict: true,
    parameters: {
      type: "object", properties: { on: { type: "boolean" }, room: { enum: ["hall", "attic"] } },
      required: ["on", "room"], additionalProperties: false,
    },
  },
}];

const models = [];
for await (const model of client.models.list()) models.push(model.id);
assert.ok(models.includes("tiny"));

const answer = await client.chat.completions.create(plain);
const text = answer.choices[0].message.content;
assert.ok(text.length > 0 && answer.usage.completion_tokens === 12);

let streamed = "", usage = null;
for await (const chunk of await client.chat.completions.create({ ...plain, stream: true, stream_options: { include_usage: true } })) {
  streamed += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(streamed, text);
assert.equal(usage.total_tokens, answer.usage.total_tokens);

// The accumulator of the client: the same message from deltas.
const accumulated = await client.chat.completions.stream({ ...plain, n: 2 }).finalChatCompletion();
assert.equal(accumulated.choices[0].message.content, text);
assert.equal(accumulated.choices.length, 2);

const calling = { ...plain, max_tokens: 200, tools, tool_choice: "required", parallel_tool_calls: false };
const called = (await client.chat.completions.create(calling)).choices[0];
assert.equal(called.finish_reason, "tool_calls");
const folded = (await client.chat.completions.stream(calling).finalChatCompletion()).choices[0];
assert.equal(folded.message.tool_calls.length, 1);
assert.deepEqual(folded.message.tool_calls[0].function.arguments, called.message.tool_calls[0].function.arguments);
assert.ok(["hall", "attic"].includes(JSON.parse(called.message.tool_calls[0].function.arguments).room));

const format = { type: "json_schema", json_schema: { name: "x", strict: true, schema: { type: "array", items: { type: "boolean" }, minItems: 2, maxItems: 2 } } };
const structured = await client.chat.completions.create({ ...plain, max_tokens: 60, response_format: format });
assert.equal(JSON.parse(structured.choices[0].message.content).length, 2);

const scored = await client.chat.completions.create({ ...plain, logprobs: true, top_logprobs: 2 });
assert.equal(Buffer.from(scored.choices[0].logprobs.content.flatMap(entry => entry.bytes)).toString(), text);

const completion = await client.completions.create({ model: "tiny", prompt: "Once", max_tokens: 5, seed: 1 });
assert.equal(completion.usage.completion_tokens, 5);

const vectors = await client.embeddings.create({ model: "encoder", input: ["the cat", "a dog"] }); // asks for base64
const floats = await client.embeddings.create({ model: "encoder", input: ["the cat", "a dog"], encoding_format: "float" });
assert.deepEqual(vectors.data.map(one => one.embedding), floats.data.map(one => one.embedding));

await assert.rejects(client.chat.completions.create({ ...plain, model: "nothing" }), error => error.status === 404 && error.code === "model_not_found");
await assert.rejects(client.chat.completions.create({ ...plain, n: 1000 }), error => error.status === 400 && error.param === "n" && Boolean(error.requestID));

const stopped = await client.chat.completions.create({ ...plain, max_tokens: 900, stream: true });
for await (const _ of stopped) { stopped.controller.abort(); break }
console.log("ok");
