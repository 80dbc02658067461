// An answer, as it grows with the events of its stream. Without elements of the page.

export function newAnswer(seed) {
  return {
    seed,
    id: "",
    content: "",
    reasoning: "",
    toolCalls: [],
    tokens: [],
    usage: null,
    finish: null,
    error: null,
    engines: "",
    firstMs: null,
    totalMs: null,
  };
}

// Adds one event of `eventsOf`. `ms` is the time since the request was sent.
export function addEvent(answer, event, ms) {
  if (event.comment !== undefined) {
    const engines = event.comment.match(/^x-swell-engine (.*)$/);
    if (engines) answer.engines = engines[1];
    return;
  }
  if (event.data === "[DONE]") return;
  const chunk = JSON.parse(event.data);
  if (chunk.error) {
    answer.error = chunk.error.message;
    return;
  }
  answer.id = chunk.id ?? answer.id;
  if (chunk.usage) answer.usage = chunk.usage;
  for (const choice of chunk.choices ?? []) addChoice(answer, choice, ms);
}

function addChoice(answer, { delta = {}, logprobs, finish_reason: finish }, ms) {
  const text = delta.content ?? "";
  const reasoning = delta.reasoning_content ?? "";
  if (answer.firstMs === null && (text || reasoning || delta.tool_calls)) answer.firstMs = ms;
  answer.content += text;
  answer.reasoning += reasoning;
  for (const part of delta.tool_calls ?? []) addCall(answer.toolCalls, part);
  answer.tokens.push(...(logprobs?.content ?? []));
  answer.finish = finish ?? answer.finish;
}

function addCall(calls, part) {
  const call = (calls[part.index] ??= { id: "", name: "", args: "" });
  call.id = part.id ?? call.id;
  call.name += part.function?.name ?? "";
  call.args += part.function?.arguments ?? "";
}

const MIN_MEASURED_MS = 50;

// Returns null for an answer that came too fast to be measured.
export function tokensPerSecond(answer) {
  const tokens = answer.usage?.completion_tokens ?? 0;
  if (tokens < 2 || answer.firstMs === null || answer.totalMs === null) return null;
  const ms = answer.totalMs - answer.firstMs;
  return ms >= MIN_MEASURED_MS ? ((tokens - 1) / ms) * 1000 : null;
}
