// Vercel's AI SDK: texts whole and streamed, objects, and a tool that it runs before it asks again.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const motet = createOpenAICompatible({
  name: "motet", baseURL: `${process.argv[2]}/v1`, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
});
const ask = { model: motet("smollm2"), prompt: "Name a boat.", seed: 7 };
const boat = z.object({ kind: z.enum(["sail", "motor"]), fast: z.boolean() });

const whole = await generateText({ ...ask, maxOutputTokens: 8 });
const stream = streamText({ ...ask, maxOutputTokens: 8 });
let text = "";
for await (const piece of stream.textStream) text += piece;
assert.equal(text, whole.text);
assert((await stream.usage).outputTokens > 0);

const formed = await generateText({ ...ask, maxOutputTokens: 100, output: Output.object({ schema: boat }) });
boat.parse(formed.output);

const asked = [];
const weather = tool({
  description: "Tells the weather of a city.",
  inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
  execute: ({ city }) => (asked.push(city), `rain in ${city}`),
});
const run = await generateText({
  ...ask, maxOutputTokens: 100, tools: { weather }, stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
});
assert.equal(run.steps.length, 2);
assert(asked.length > 0 && asked.every((city) => ["Paris", "Rome"].includes(city)));
