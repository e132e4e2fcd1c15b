// Vercel's AI SDK, which validates every chunk, against a server: node ai_sdk.mjs BASE_URL
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const rlx = createOpenAICompatible({ name: "rlx", baseURL: process.argv[2], apiKey: "none", includeUsage: true, supportsStructuredOutputs: true });
const plain = { model: rlx.chatModel("tiny"), prompt: "Say something.", maxOutputTokens: 12, seed: 5, maxRetries: 0 };

const answer = await generateText(plain);
assert.ok(answer.text.length > 0 && answer.usage.outputTokens === 12);

const stream = streamText({ ...plain, onError: ({ error }) => { throw error } });
let text = "";
for await (const piece of stream.textStream) text += piece;
assert.equal(text, answer.text);
assert.equal((await stream.usage).totalTokens, answer.usage.totalTokens);
assert.equal(await stream.finishReason, "length");

const schema = z.object({ on: z.boolean(), room: z.enum(["hall", "attic"]) });
const { object } = await generateObject({ ...plain, maxOutputTokens: 100, schema });
assert.ok(["hall", "attic"].includes(object.room));

const calls = [];
const tools = { set_light: tool({ description: "Switch a light.", inputSchema: schema, execute: async input => { calls.push(input); return "done" } }) };
for (const run of [generateText, streamText]) {
  const result = await run({ ...plain, maxOutputTokens: 300, tools, toolChoice: "required", stopWhen: stepCountIs(1) });
  const made = await result.toolCalls;
  assert.ok(made.length >= 1 && made.every(call => schema.safeParse(call.input).success));
}
assert.ok(calls.length >= 2);

// A conversation with results of calls goes on.
const second = await generateText({ ...plain, tools, toolChoice: "auto", stopWhen: stepCountIs(2) });
assert.ok(["length", "stop", "tool-calls"].includes(second.finishReason));

const completed = await generateText({ ...plain, model: rlx.completionModel("tiny") });
assert.equal(completed.usage.outputTokens, 12);
let continued = "";
for await (const piece of streamText({ ...plain, model: rlx.completionModel("tiny"), onError: ({ error }) => { throw error } }).textStream) continued += piece;
assert.equal(continued, completed.text);

const { embeddings } = await embedMany({ model: rlx.textEmbeddingModel("encoder"), values: ["the cat", "a dog"] });
assert.equal(embeddings.length, 2);

await assert.rejects(generateText({ ...plain, model: rlx.chatModel("nothing") }), error => error.statusCode === 404);
console.log("ok");
