// The official client for JavaScript: n choices whole and streamed, tools, schemas, and Responses.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none" });
const ask = { model: "smollm2", messages: [{ role: "user", content: "Name a boat." }], seed: 7 };
const boat = {
  type: "object",
  properties: { kind: { type: "string", enum: ["sail", "motor"] }, fast: { type: "boolean" } },
  required: ["kind", "fast"],
  additionalProperties: false,
};
const weather = {
  type: "function",
  function: {
    name: "get_weather",
    parameters: { type: "object", properties: { city: { type: "string", enum: ["Paris"] } }, required: ["city"] },
  },
};

const whole = await client.chat.completions.create({ ...ask, n: 3, max_tokens: 8 });
assert.deepEqual(whole.choices.map((choice) => choice.index), [0, 1, 2]);
assert(whole.usage.completion_tokens > 3);

const pieces = ["", "", ""];
let usage;
const stream = await client.chat.completions.create({
  ...ask, n: 3, max_tokens: 8, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  usage = chunk.usage ?? usage;
  for (const choice of chunk.choices) pieces[choice.index] += choice.delta.content ?? "";
}
assert.deepEqual(pieces, whole.choices.map((choice) => choice.message.content));
assert.equal(usage.completion_tokens, whole.usage.completion_tokens);

const helper = client.chat.completions.stream({
  ...ask, n: 2, max_tokens: 300, tools: [weather], tool_choice: "required", parallel_tool_calls: false,
});
const called = await helper.finalChatCompletion();
assert.equal(called.choices.length, 2);
for (const choice of called.choices)
  assert.deepEqual(JSON.parse(choice.message.tool_calls[0].function.arguments), { city: "Paris" });

const parsed = await client.chat.completions.parse({
  ...ask, n: 2, max_tokens: 300,
  response_format: { type: "json_schema", json_schema: { name: "boat", schema: boat, strict: true } },
});
for (const choice of parsed.choices) assert(["sail", "motor"].includes(choice.message.parsed.kind));

const response = await client.responses.create({
  model: "smollm2", input: "Name a boat.", temperature: 0, max_output_tokens: 300,
  text: { format: { type: "json_schema", name: "boat", schema: boat, strict: true } },
});
assert.equal(typeof JSON.parse(response.output_text).fast, "boolean");
