// AI SDK: text, stream, tools, object.
import assert from "node:assert";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "paceline",
  baseURL: process.env.BASE_URL,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider(process.env.MODEL);
const common = { model, maxRetries: 0, temperature: 0, maxOutputTokens: 100 };

assert((await generateText({ ...common, prompt: "Which city is the capital of France?" })).text);
let text = "";
for await (const part of streamText({ ...common, prompt: "Which city is the capital of France?" }).textStream) text += part;
assert(text);
const weather = tool({
  description: "The weather in a city",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `sunny in ${city}`,
});
const called = await generateText({
  ...common,
  prompt: "What is the weather in Paris?",
  tools: { weather },
  stopWhen: stepCountIs(3),
});
assert(called.steps.length >= 1);
const schema = z.object({ city: z.string(), days: z.number().int() });
assert((await generateObject({ ...common, schema, prompt: "Three days in Paris." })).object.city);
