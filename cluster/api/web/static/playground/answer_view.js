// Shows an answer while it grows.

import { el, setText } from "../lib/dom.js";
import { count, seconds } from "../lib/format.js";
import { tokensPerSecond } from "./answer.js";
import { tokenTable, tokenText } from "./tokens.js";

const FINISHES = {
  stop: "complete",
  length: "cut at the token limit",
  tool_calls: "calls tools",
  stopped: "stopped by you",
};

export class AnswerView {
  #answer;
  #onTyping;
  #onResults;
  #inputs = [];
  #isDue = false;

  // `onTyping` is called when a result of a tool changes, and `onResults` to send all of them.
  constructor(answer, { onChoose, onTyping, onResults }) {
    this.#answer = answer;
    this.#onTyping = onTyping;
    this.#onResults = onResults;
    this.reasoningText = el("p");
    const summary = el("summary", {}, "Reasoning");
    this.reasoning = el("details", { hidden: true }, summary, this.reasoningText);
    this.text = el("p", { class: "answer-text" });
    this.tokens = el("div", { class: "tokens", hidden: true });
    this.calls = el("form", { class: "calls", autocomplete: "off", onsubmit: this.#onSubmit });
    this.error = el("p", { class: "error", role: "alert", hidden: true });
    this.meta = el("p", { class: "meta" });
    this.choose = el("button", { type: "button", class: "quiet", onclick: onChoose, hidden: true });
    const parts = [this.reasoning, this.text, this.tokens, this.calls, this.error, this.meta];
    this.title = el("h2", {}, "Model");
    this.element = el("div", { class: "answer" }, this.title, ...parts, this.choose);
    this.element.setAttribute("aria-busy", "true");
  }

  setChosen(hasChoice, isChosen) {
    this.choose.hidden = !hasChoice;
    this.choose.setAttribute("aria-pressed", String(isChosen));
    setText(this.choose, isChosen ? "The conversation continues from here" : "Continue from here");
    if (hasChoice) setText(this.title, `Model, seed ${this.#answer.seed || "random"}`);
  }

  // Draws at most once a frame, however fast the tokens come.
  update() {
    if (this.#isDue) return;
    this.#isDue = true;
    requestAnimationFrame(() => {
      if (!this.#isDue) return; // it has finished meanwhile
      this.#isDue = false;
      this.#draw();
    });
  }

  finish() {
    this.#isDue = false;
    this.#draw();
    this.element.setAttribute("aria-busy", "false");
    const { id } = this.#answer;
    const link = id ? [" · ", el("a", { href: timelineAddress(id) }, "timeline")] : [];
    this.meta.replaceChildren(metaText(this.#answer), ...link);
    this.#drawCalls(true);
    if (this.#answer.tokens.length) this.#drawTokens();
  }

  #draw() {
    const { content, reasoning, error } = this.#answer;
    setText(this.text, content);
    setText(this.reasoningText, reasoning);
    this.reasoning.hidden = reasoning === "";
    if (reasoning && !content) this.reasoning.open = true;
    this.error.hidden = error === null;
    setText(this.error, error ?? "");
    this.#drawCalls(false);
  }

  #drawTokens() {
    const table = el("div", { class: "token-detail", "aria-live": "polite" });
    const show = (token) => table.replaceChildren(tokenTable(token));
    this.tokens.replaceChildren(tokenText(this.#answer.tokens, show), table);
    this.tokens.hidden = false;
    this.text.hidden = true;
  }

  #drawCalls(isComplete) {
    const { toolCalls } = this.#answer;
    if (!toolCalls.length) return;
    const rows = toolCalls.map(({ name, args }) =>
      el("div", { class: "call" }, el("code", {}, `${name}(${args})`)),
    );
    if (isComplete) this.#addResults(rows);
    this.calls.replaceChildren(...rows);
  }

  #addResults(rows) {
    this.#inputs = this.#answer.toolCalls.map(({ name }, index) => {
      const label = `Result of ${name}`;
      const input = el("input", { "aria-label": label, placeholder: label });
      input.addEventListener("input", this.#onTyping);
      rows[index].append(input);
      return input;
    });
    rows.push(el("button", {}, "Send the results"));
  }

  // The results as they are typed now, as messages: [] if no tool was called.
  results() {
    return this.#inputs.map((input, index) => ({
      role: "tool",
      tool_call_id: this.#answer.toolCalls[index].id,
      content: input.value,
    }));
  }

  // Results are sent once: a later turn has seen them.
  closeResults() {
    for (const one of this.calls.elements) one.disabled = true;
  }

  #onSubmit = (event) => {
    event.preventDefault();
    this.#onResults();
  };
}

function timelineAddress(id) {
  return `#cluster/requests/${encodeURIComponent(id)}`;
}

function metaText(answer) {
  const speed = tokensPerSecond(answer);
  const parts = [
    answer.finish && (FINISHES[answer.finish] ?? answer.finish),
    answer.usage && `${count(answer.usage.completion_tokens)} tokens`,
    answer.firstMs !== null && `first after ${seconds(answer.firstMs / 1000)}`,
    speed !== null && `${count(speed)} tokens/s`,
    answer.engines && `engine ${answer.engines.replaceAll(",", " → ")}`,
  ];
  return parts.filter(Boolean).join(" · ");
}
