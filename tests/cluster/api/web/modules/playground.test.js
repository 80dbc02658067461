import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { test } from "node:test";
import { addEvent, newAnswer, tokensPerSecond } from "./static/playground/answer.js";
import { FieldError, chatBody } from "./static/playground/request.js";
import { curlText, pythonText, pythonValue } from "./static/playground/snippets.js";
import { level } from "./static/playground/tokens.js";

const FIELDS = { model: "nano", system: "", temperature: "", seed: "" };
const ask = (text) => ({ messages: [{ role: "user", content: text }] });

function answered(text, changes = {}) {
  return { ...ask(text), chosen: 0, answers: [{ ...newAnswer("1"), content: "yes", ...changes }] };
}

test("an empty form asks with the defaults of the server", () => {
  assert.deepEqual(chatBody(FIELDS, [ask("hi")]), {
    model: "nano",
    messages: [{ role: "user", content: "hi" }],
    stream: true,
    stream_options: { include_usage: true },
  });
});

test("every field of the form is in the body", () => {
  const fields = {
    ...FIELDS,
    system: "Be brief.",
    temperature: "0.5",
    max_tokens: " 7 ",
    stop: "\\n\nEND\n",
    tools: '[{"type": "function"}]',
    tool_choice: "required",
    schema: '{"type": "object"}',
    logprobs: true,
  };
  const body = chatBody(fields, [ask("hi")], "9");
  assert.equal(body.messages[0].content, "Be brief.");
  assert.deepEqual([body.temperature, body.max_tokens, body.seed], [0.5, 7, 9]);
  assert.deepEqual(body.stop, ["\n", "END"]);
  assert.deepEqual(body.tools, [{ type: "function" }]);
  assert.equal(body.tool_choice, "required");
  assert.deepEqual(body.response_format.json_schema.schema, { type: "object" });
  assert.deepEqual([body.logprobs, body.top_logprobs], [true, 5]);
});

test("the history has the chosen answers, and leaves out turns that failed", () => {
  const other = { ...newAnswer("2"), content: "no" };
  const two = answered("one");
  two.answers.push(other);
  two.chosen = 1;
  const failed = answered("two", { content: "", error: "gone" });
  const texts = chatBody(FIELDS, [two, failed, ask("three")]).messages.map((one) => one.content);
  assert.deepEqual(texts, ["one", "no", "three"]);
});

test("calls of tools are sent back with their ids", () => {
  const turn = answered("weather?", { content: "", toolCalls: [{ id: "c1", name: "f", args: "{}" }] });
  const results = { messages: [{ role: "tool", tool_call_id: "c1", content: "sun" }] };
  const [, call, result] = chatBody(FIELDS, [turn, results]).messages;
  const wanted = [{ id: "c1", type: "function", function: { name: "f", arguments: "{}" } }];
  assert.deepEqual(call.tool_calls, wanted);
  assert.equal(result.tool_call_id, "c1");
});

test("a wrong field is named", () => {
  for (const [field, text] of [["seed", "x"], ["tools", "[{]"], ["temperature", "1,5"]]) {
    const wrong = { ...FIELDS, [field]: text };
    assert.throws(() => chatBody(wrong, [ask("hi")]), (error) => error instanceof FieldError && error.field === field);
  }
});

test("an answer collects text, reasoning, calls, tokens and errors", () => {
  const answer = newAnswer("1");
  const choice = (delta, more = {}) => ({ data: JSON.stringify({ id: "c", choices: [{ delta, ...more }] }) });
  addEvent(answer, choice({ role: "assistant" }), 1);
  addEvent(answer, choice({ reasoning_content: "hm" }), 5);
  const logprobs = { content: [{ token: "a", logprob: 0 }] };
  addEvent(answer, choice({ content: "a" }, { logprobs }), 6);
  addEvent(answer, choice({ tool_calls: [{ index: 0, id: "t", function: { name: "f", arguments: "{" } }] }), 7);
  addEvent(answer, choice({ tool_calls: [{ index: 0, function: { arguments: "}" } }] }), 8);
  addEvent(answer, choice({}, { finish_reason: "tool_calls" }), 9);
  addEvent(answer, { data: JSON.stringify({ choices: [], usage: { completion_tokens: 11 } }) }, 9);
  addEvent(answer, { comment: "x-swell-engine 0,1" }, 9);
  addEvent(answer, { data: "[DONE]" }, 9);
  const { reasoning, content, toolCalls, tokens, finish, engines, firstMs } = answer;
  assert.deepEqual({ reasoning, content, finish, engines, firstMs }, {
    reasoning: "hm", content: "a", finish: "tool_calls", engines: "0,1", firstMs: 5,
  });
  assert.deepEqual(toolCalls, [{ id: "t", name: "f", args: "{}" }]);
  assert.equal(tokens.length, 1);
  answer.totalMs = 105;
  assert.equal(tokensPerSecond(answer), 100);
  addEvent(answer, { data: JSON.stringify({ error: { message: "lost" } }) }, 9);
  assert.equal(answer.error, "lost");
});

test("a shell passes the body on unchanged", () => {
  const body = chatBody(FIELDS, [ask("it's $HOME `date` \\ \"x\"\nend")]);
  const command = curlText("http://host", body, true).replace(/^curl -N/, "printf '%s\\n'");
  const printed = execFileSync("sh", ["-c", command], { env: { SWELL_KEY: "k" } }).toString();
  assert.match(printed, /^authorization: Bearer k$/m);
  assert.deepEqual(JSON.parse(printed.slice(printed.indexOf("{"))), body);
});

test("values are written as Python writes them", () => {
  assert.equal(pythonValue([true, null, 0.5, "a\"\n"]), '[\n    True,\n    None,\n    0.5,\n    "a\\"\\n",\n]');
  assert.equal(pythonValue({}), "{}");
  const body = { ...chatBody({ ...FIELDS, top_k: "3" }, [ask("hi")]) };
  const text = pythonText("http://host", body, false);
  assert.match(text, /base_url="http:\/\/host\/v1", api_key="none"/);
  assert.match(text, /extra_body=\{\n {8}"top_k": 3,\n {4}\},/);
  assert.doesNotMatch(text, /import os/);
});

test("improbable tokens have high levels", () => {
  assert.deepEqual([1, 0.9, 0.7, 0.3, 0.1, 0].map(level), [0, 0, 1, 2, 3, 4]);
});
