// The body of a chat request, made of the fields of the form and of the conversation.

export class FieldError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

// `fields` holds texts as typed; an empty text leaves its parameter out.
export function chatBody(fields, turns, seed = fields.seed) {
  const body = { model: fields.model, messages: messages(fields.system, turns), stream: true };
  body.stream_options = { include_usage: true };
  const numbers = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "presence_penalty"];
  for (const name of numbers) setNumber(body, name, fields[name]);
  setNumber(body, "frequency_penalty", fields.frequency_penalty);
  setNumber(body, "seed", seed);
  const stops = (fields.stop ?? "").split("\n").filter((line) => line !== "");
  if (stops.length) body.stop = stops.map(unescaped);
  const tools = parsed("tools", fields.tools);
  if (tools !== undefined) body.tools = tools;
  if (fields.tool_choice) body.tool_choice = fields.tool_choice;
  const schema = parsed("schema", fields.schema);
  if (schema !== undefined) {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (fields.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  return body;
}

function messages(system, turns) {
  const found = system.trim() ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    const answer = turn.answers?.[turn.chosen];
    if (answer && isEmpty(answer)) continue; // it failed: the next turn asks again
    found.push(...turn.messages);
    if (answer) found.push(answerMessage(answer));
  }
  return found;
}

function isEmpty(answer) {
  return answer.content === "" && answer.toolCalls.length === 0;
}

export function answerMessage(answer) {
  const message = { role: "assistant", content: answer.content };
  if (answer.toolCalls.length) {
    message.tool_calls = answer.toolCalls.map(({ id, name, args }) => ({
      id,
      type: "function",
      function: { name, arguments: args },
    }));
  }
  return message;
}

function setNumber(body, name, text) {
  if (text === undefined || text.trim() === "") return;
  const value = Number(text);
  if (!Number.isFinite(value)) throw new FieldError(name, `${name}: ${text} is not a number`);
  body[name] = value;
}

function parsed(field, text) {
  if (text === undefined || text.trim() === "") return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new FieldError(field, `${field}: this is not JSON (${error.message})`);
  }
}

// A stop string is typed on one line; \n and \t stand for a line break and a tab.
function unescaped(line) {
  const known = { "\\n": "\n", "\\t": "\t", "\\\\": "\\" };
  return line.replace(/\\[nt\\]/g, (found) => known[found]);
}
