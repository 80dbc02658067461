// The playground: a conversation with the model, and the request that each turn sends.

import { byId, el, setText } from "../lib/dom.js";
import { hasKey, send, sendJson } from "../lib/http.js";
import { eventsOf } from "../lib/sse.js";
import { addEvent, newAnswer } from "./answer.js";
import { AnswerView } from "./answer_view.js";
import { EXAMPLE_SCHEMA, EXAMPLE_TOOLS } from "./examples.js";
import { chatBody } from "./request.js";
import { curlText, pythonText } from "./snippets.js";

const turns = [];
let running = null;
let language = "curl";

export function openPlayground() {
  const settings = byId("settings");
  byId("composer").addEventListener("submit", onSubmit);
  byId("prompt").addEventListener("keydown", onKey);
  byId("stop").addEventListener("click", stop);
  byId("clear").addEventListener("click", clear);
  byId("as-code").addEventListener("click", toggleCode);
  byId("code-curl").addEventListener("click", () => chooseLanguage("curl"));
  byId("code-python").addEventListener("click", () => chooseLanguage("python"));
  byId("code-copy").addEventListener("click", copyCode);
  settings.addEventListener("submit", (event) => event.preventDefault());
  settings.addEventListener("input", onSettings);
  byId("prompt").addEventListener("input", showCode);
  byId("example-tools").addEventListener("click", () => fill("tools", EXAMPLE_TOOLS));
  byId("example-schema").addEventListener("click", () => fill("schema", EXAMPLE_SCHEMA));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running) stop();
  });
  showModels();
  return { show: () => byId("prompt").focus() };
}

async function showModels() {
  try {
    const { data } = await sendJson("/v1/models");
    const options = data.map(({ id, parent }) =>
      el("option", { value: id }, parent ? `${id} (adapter)` : id),
    );
    byId("model").replaceChildren(...options);
    showError("");
  } catch (error) {
    showError(error.message);
  }
}

function fields() {
  const form = byId("settings");
  const found = Object.fromEntries(new FormData(form));
  return { ...found, logprobs: form.logprobs.checked, compare: form.compare.checked };
}

function onSettings() {
  byId("second-seed").hidden = !byId("settings").compare.checked;
  showCode();
}

function fill(name, value) {
  byId("settings").elements[name].value = JSON.stringify(value, null, 2);
  showCode();
}

function onKey(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("composer").requestSubmit();
}

function onSubmit(event) {
  event.preventDefault();
  const text = byId("prompt").value;
  if (!text.trim()) return;
  if (ask([{ role: "user", content: text }])) {
    byId("prompt").value = "";
    showCode();
  }
}

// Adds a turn with these messages and lets the model answer it. Returns false if an answer is in
// progress, or the fields of the form are wrong.
function ask(messages) {
  if (running) return false;
  const given = fields();
  const turn = { messages, answers: [], chosen: 0 };
  const seeds = given.compare ? [given.seed, given.seed_b] : [given.seed];
  let bodies;
  try {
    bodies = seeds.map((seed) => chatBody(given, [...turns, turn], seed));
  } catch (error) {
    showError(error.message);
    return false;
  }
  showError("");
  turns.at(-1)?.views.forEach((view) => view.closeResults());
  turns.push(turn);
  const views = seeds.map((seed) => startAnswer(turn, seed));
  byId("turns").append(turnElement(turn, views));
  scrollDown(true);
  run(bodies, turn.answers, views);
  return true;
}

function startAnswer(turn, seed) {
  const index = turn.answers.push(newAnswer(seed)) - 1;
  return new AnswerView(turn.answers[index], {
    onChoose: () => choose(turn, index),
    onTyping: showCode,
    onResults: () => sendResults(turn, index),
  });
}

function sendResults(turn, index) {
  if (turn !== turns.at(-1)) return;
  choose(turn, index);
  ask(turn.views[index].results());
}

function turnElement(turn, views) {
  const said = turn.messages.map(({ role, content }) => {
    const title = el("h2", {}, role === "tool" ? "Tool" : "You");
    return el("div", { class: "said" }, title, el("p", {}, content));
  });
  views.forEach((view, index) => view.setChosen(views.length > 1, index === turn.chosen));
  turn.views = views;
  const answers = el("div", { class: "answers" }, ...views.map((view) => view.element));
  return el("article", { class: "turn" }, ...said, answers);
}

function choose(turn, index) {
  turn.chosen = index;
  turn.views.forEach((view, one) => view.setChosen(turn.views.length > 1, one === index));
  showCode();
}

async function run(bodies, answers, views) {
  running = new AbortController();
  setRunning(true);
  const { signal } = running;
  const streams = bodies.map((body, one) => stream(body, answers[one], views[one], signal));
  await Promise.all(streams);
  running = null;
  setRunning(false);
  showCode();
}

async function stream(body, answer, view, signal) {
  const began = performance.now();
  try {
    const options = { method: "POST", body, signal };
    const response = await send("/v1/chat/completions", options);
    answer.engines = response.headers.get("x-swell-engine") ?? "";
    for await (const event of eventsOf(response)) {
      addEvent(answer, event, performance.now() - began);
      view.update();
      scrollDown(false);
    }
    if (!answer.finish && !answer.error) answer.error = "The connection broke.";
  } catch (error) {
    if (error.name === "AbortError") answer.finish = "stopped";
    else answer.error = error.message ?? String(error);
  }
  answer.totalMs = performance.now() - began;
  view.finish();
  scrollDown(false);
}

function stop() {
  running?.abort();
}

function clear() {
  stop();
  turns.length = 0;
  byId("turns").replaceChildren();
  showError("");
  showCode();
  byId("prompt").focus();
}

function setRunning(isRunning) {
  byId("send").disabled = isRunning;
  byId("stop").disabled = !isRunning;
  byId("turns").setAttribute("aria-busy", String(isRunning));
}

// Follows the growing answer, unless the reader has scrolled up.
function scrollDown(always) {
  const place = byId("turns");
  const left = place.scrollHeight - place.scrollTop - place.clientHeight;
  if (always || left < 120) place.scrollTop = place.scrollHeight;
}

function showError(message) {
  const place = byId("form-error");
  setText(place, message);
  place.hidden = message === "";
}

function toggleCode() {
  const place = byId("code");
  place.hidden = !place.hidden;
  byId("as-code").setAttribute("aria-expanded", String(!place.hidden));
  showCode();
}

function chooseLanguage(name) {
  language = name;
  byId("code-curl").setAttribute("aria-pressed", String(name === "curl"));
  byId("code-python").setAttribute("aria-pressed", String(name === "python"));
  showCode();
}

function showCode() {
  if (byId("code").hidden) return;
  const text = byId("prompt").value;
  const last = turns.at(-1);
  const results = last?.views[last.chosen].results() ?? [];
  const next = text.trim() ? [{ role: "user", content: text }] : results;
  const shown = next.length
    ? [...turns, { messages: next }]
    : [...turns.slice(0, -1), ...turns.slice(-1).map(({ messages }) => ({ messages }))];
  const base = new URL(".", document.baseURI).href.replace(/\/$/, "");
  const write = language === "curl" ? curlText : pythonText;
  try {
    setText(byId("code-text"), write(base, chatBody(fields(), shown), hasKey("user")));
  } catch (error) {
    setText(byId("code-text"), error.message);
  }
}

async function copyCode() {
  try {
    await navigator.clipboard.writeText(byId("code-text").textContent);
    setText(byId("code-copy"), "Copied");
  } catch {
    setText(byId("code-copy"), "Select and copy the text");
  }
  setTimeout(() => setText(byId("code-copy"), "Copy"), 2000);
}
