// Holds the samples' conversation through the AI SDK and prints its spans, one OTLP request a line.
// Arguments: the endpoint's address and the conversation as JSON. make_ai_sdk.py starts it.
import { createOpenAI } from "@ai-sdk/openai";
import { JsonTraceSerializer } from "@opentelemetry/otlp-transformer";
import { InMemorySpanExporter, SimpleSpanProcessor } from "@opentelemetry/sdk-trace-base";
import { NodeTracerProvider } from "@opentelemetry/sdk-trace-node";
import { generateText, jsonSchema, streamText, tool } from "ai";

const [address, text] = process.argv.slice(2);
const conversation = JSON.parse(text);
const exporter = new InMemorySpanExporter();
new NodeTracerProvider({ spanProcessors: [new SimpleSpanProcessor(exporter)] }).register();

const tools = Object.fromEntries(
  conversation.tools.map(({ function: { name, description, parameters } }) => [
    name,
    tool({ description, inputSchema: jsonSchema(parameters) }),
  ]),
);
const messages = [
  { role: "system", content: conversation.system },
  { role: "user", content: conversation.first },
];
const settings = {
  model: createOpenAI({ baseURL: `${address}/v1`, apiKey: "none" }).chat("scripted-1"),
  messages,
  tools,
  experimental_telemetry: { isEnabled: true, metadata: { sessionId: "shop-1" } },
};

const first = await generateText(settings);
messages.push(...first.response.messages);
messages.push({
  role: "tool",
  content: first.toolCalls.map(({ toolCallId, toolName }, index) => ({
    type: "tool-result",
    toolCallId,
    toolName,
    output: { type: "text", value: conversation.results[index] },
  })),
});
const second = await generateText(settings);
messages.push(...second.response.messages);
messages.push({
  role: "user",
  content: [
    { type: "text", text: conversation.second },
    { type: "image", image: conversation.image, mediaType: "image/png" },
  ],
});
for await (const _ of streamText(settings).textStream);

for (const span of exporter.getFinishedSpans()) {
  console.log(new TextDecoder().decode(JsonTraceSerializer.serializeRequest([span])));
}
