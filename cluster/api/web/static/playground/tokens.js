// Tokens with their probabilities.

import { el } from "../lib/dom.js";
import { percent } from "../lib/format.js";

// Returns the text with one button for each token; `onShow` gets the token that was chosen.
export function tokenText(tokens, onShow) {
  const buttons = tokens.map((token) => {
    const probability = Math.exp(token.logprob);
    const button = el("button", {
      type: "button",
      class: "token",
      "data-level": level(probability),
      title: percent(probability),
      onclick: () => onShow(token),
    });
    button.textContent = token.token;
    return button;
  });
  return el("p", { class: "answer-text" }, ...buttons);
}

// 0: almost certain, 4: improbable.
export function level(probability) {
  const found = [0.9, 0.6, 0.3, 0.1].findIndex((bound) => probability >= bound);
  return found < 0 ? 4 : found;
}

export function tokenTable(token) {
  const rows = token.top_logprobs.map((one) =>
    el(
      "tr",
      one.token === token.token ? { class: "sampled" } : {},
      el("td", {}, el("code", {}, JSON.stringify(one.token))),
      el("td", { class: "number" }, percent(Math.exp(one.logprob))),
      el("td", { class: "number" }, one.logprob.toFixed(3)),
    ),
  );
  const heads = ["Token", "Probability", "Log"].map((text) => el("th", { scope: "col" }, text));
  return el("table", {}, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...rows));
}
