// Vercel's AI SDK: texts whole and streamed, objects, and a tool that it runs before it asks again; with its provider
// for compatible servers, and with that for OpenAI over Responses and over chat.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const server = { baseURL: `${process.argv[2]}/v1`, apiKey: "none" };
const motet = createOpenAICompatible({ ...server, name: "motet", includeUsage: true, supportsStructuredOutputs: true });
const openai = createOpenAI(server);
const boat = z.object({ kind: z.enum(["sail", "motor"]), fast: z.boolean() });

const seeded = { model: motet("smollm2"), prompt: "Name a boat.", seed: 7, maxOutputTokens: 8 };
const whole = await generateText(seeded);
let text = "";
for await (const piece of streamText(seeded).textStream) text += piece;
assert.equal(text, whole.text);

for (const model of [motet("smollm2"), openai("smollm2"), openai.chat("smollm2")]) {
  const ask = { model, prompt: "Name a boat.", temperature: 0, maxOutputTokens: 300 };
  const formed = await generateText({ ...ask, output: Output.object({ schema: boat }) });
  boat.parse(formed.output);
  const stream = streamText({ ...ask, output: Output.object({ schema: boat }) });
  boat.parse(await stream.output);
  assert((await stream.usage).outputTokens > 0);

  const cities = [];
  const weather = tool({
    description: "Returns the weather of a city.",
    inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
    execute: ({ city }) => (cities.push(city), `rain in ${city}`),
  });
  const run = await generateText({
    ...ask, tools: { weather }, stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? { type: "tool", toolName: "weather" } : "none" }),
  });
  assert.equal(run.steps.length, 2);
  assert.equal(cities.length, 1);
  assert(["Paris", "Rome"].includes(cities[0]));
}
