// openai (JavaScript): chat, stream, tools, Responses API.
import assert from "node:assert";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "none", maxRetries: 0 });
const model = process.env.MODEL;
const messages = [{ role: "user", content: "What is the weather in Paris?" }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "weather", parameters } }];
const options = { model, messages, temperature: 0, max_tokens: 100 };

const whole = await client.chat.completions.create(options);
assert(whole.choices[0].message.content);
if (process.env.ANSWER) assert.equal(whole.choices[0].message.content, process.env.ANSWER);
const runner = client.chat.completions.stream(options);
assert.equal(await runner.finalContent(), whole.choices[0].message.content);
const called = client.chat.completions.stream({ ...options, tools, tool_choice: "required" });
const message = await called.finalMessage();
assert("city" in JSON.parse(message.tool_calls[0].function.arguments));
const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "sunny" };
await client.chat.completions.create({ ...options, messages: [...messages, message, result], tools });
let text = "";
for await (const event of await client.responses.create({ model, input: "Hello", max_output_tokens: 60, stream: true })) {
  if (event.type === "response.output_text.delta") text += event.delta;
}
assert(text);
