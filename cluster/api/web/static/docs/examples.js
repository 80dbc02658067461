// Bodies of requests that run as they are. `model` is a name that the server serves.

const messages = [{ role: "user", content: "Hello!" }];

const BODIES = {
  "/v1/chat/completions": (model) => ({ model, messages, max_tokens: 32, stream: true }),
  "/v1/completions": (model) => ({ model, prompt: "Once upon a time", max_tokens: 16 }),
  "/v1/responses": (model) => ({ model, input: "Hello!", max_output_tokens: 32 }),
  "/v1/messages": (model) => ({ model, messages, max_tokens: 32 }),
  "/v1/messages/count_tokens": (model) => ({ model, messages }),
  "/v1/embeddings": (model) => ({ model, input: ["Hello!"] }),
  "/v1/sessions": (model) => ({ model }),
  "/tokenize": (model) => ({ model, prompt: "Hello!" }),
  "/detokenize": (model) => ({ model, tokens: [1, 2, 3] }),
  "/admin/scale": () => ({ engines: 2 }),
  "/admin/drain": () => ({ rank: 0 }),
  "/admin/sleep": () => ({ level: 1 }),
  "/admin/update_weights": () => ({ path: "/models/other" }),
  "/admin/upgrade": () => ({ config: { model: { path: "/models/other" } } }),
  "/v1/load_lora_adapter": () => ({ lora_name: "my-adapter", lora_path: "/adapters/mine" }),
  "/v1/unload_lora_adapter": () => ({ lora_name: "my-adapter" }),
};

export function exampleBody(path, model) {
  if (path in BODIES) return BODIES[path](model);
  if (path.endsWith("/rerank")) return { model, query: "Hello!", documents: ["Hi!", "Bye!"] };
  if (path.endsWith("/classify")) return { model, input: ["Hello!"] };
  if (path.endsWith("/score")) return { model, text_1: "Hello!", text_2: ["Hi!", "Bye!"] };
  return {};
}
