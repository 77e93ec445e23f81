// The official client for JavaScript against a server: js_client.mjs URL KEY. Says "ok" or fails.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, key] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0, timeout: 60_000 });

const names = (await client.models.list()).data.map((model) => model.id);
assert(names.includes("chat"), names.join());

const ask = { model: "chat", messages: [{ role: "user", content: "read a file" }], max_completion_tokens: 24, temperature: 0 };
const whole = await client.chat.completions.create(ask);
const text = whole.choices[0].message.content;
assert(text.length > 0 && whole.usage.completion_tokens > 0);

let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...ask, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(streamed, text);

const stop = text.slice(text.length / 2).slice(0, 3);
const stopped = await client.chat.completions.create({ ...ask, stop: [stop] });
assert.equal(stopped.choices[0].message.content, text.split(stop)[0]);

const schema = { type: "object", properties: { kind: { enum: ["a", "b"] } }, required: ["kind"], additionalProperties: false };
const form = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
const formed = await client.chat.completions.create({ ...ask, max_completion_tokens: 60, response_format: form });
assert(["a", "b"].includes(JSON.parse(formed.choices[0].message.content).kind));

const tools = [{ type: "function", function: { name: "look", parameters: schema } }];
const called = await client.chat.completions.create({ ...ask, model: "tools", max_completion_tokens: 80, tools, tool_choice: "required" });
assert.equal(called.choices[0].message.tool_calls[0].function.name, "look");
assert.equal(called.choices[0].finish_reason, "tool_calls");

const vector = (await client.embeddings.create({ model: "plain", input: "import os" })).data[0].embedding;
assert.equal(vector.length, 384);

await assert.rejects(client.chat.completions.create({ ...ask, model: "other" }), (error) => error.status === 404 && error.code === "model_not_found");
await assert.rejects(client.chat.completions.create({ ...ask, temperature: 9 }), (error) => error.status === 400 && error.param === "temperature");

// Cancellation, by the client's own means.
const long = await client.completions.create({ model: "plain", prompt: "def ", max_tokens: 900, ignore_eos: true, stream: true });
for await (const _ of long) {
  long.controller.abort();
  break;
}
const signal = AbortSignal.timeout(100);
await assert.rejects(client.completions.create({ model: "plain", prompt: Array(16).fill("def "), max_tokens: 900, ignore_eos: true }, { signal }));
console.log("ok");
