// The buttons of operators.

import { el } from "../lib/dom.js";
import {
  RESUME, WAKE, pauseAction, scaleAction, sleepAction, upgradeAction, weightsAction,
} from "./actions.js";
import { confirmAction } from "./confirm.js";

// `state` returns the newest event, or null before the first.
export function controlsElement(state) {
  const run = (make) => () => state() && confirmAction(make(state()));
  const engines = el("input", { type: "number", min: 1, id: "scale-to", "aria-label": "Engines" });
  const scale = (event) => {
    event.preventDefault();
    if (state() && engines.value) confirmAction(scaleAction(state(), Number(engines.value)));
  };
  const button = (text, onclick) => {
    return el("button", { type: "button", id: text.toLowerCase(), onclick }, text);
  };
  return el(
    "div",
    { class: "controls" },
    el("form", { class: "row", onsubmit: scale }, engines, el("button", {}, "Scale")),
    el(
      "div",
      { class: "row" },
      button("Pause", run(pauseAction)),
      button("Resume", run(() => RESUME)),
      button("Sleep", run(() => sleepAction(1))),
      button("Wake", run(() => WAKE)),
    ),
    upgradeElement(),
  );
}

function upgradeElement() {
  const label = "Folder of other weights";
  const folder = el("input", { "aria-label": label, placeholder: "/models/other" });
  const config = el("textarea", { class: "code", rows: 6, spellcheck: "false" });
  const error = el("p", { class: "error", role: "alert" });
  const onWeights = (event) => {
    event.preventDefault();
    if (folder.value.trim()) confirmAction(weightsAction(folder.value.trim()));
  };
  const onConfig = (event) => {
    event.preventDefault();
    error.textContent = "";
    try {
      confirmAction(upgradeAction(JSON.parse(config.value)));
    } catch (wrong) {
      error.textContent = `This is not JSON: ${wrong.message}`;
    }
  };
  return el(
    "details",
    {},
    el("summary", {}, "Upgrade"),
    el(
      "form",
      { class: "row", onsubmit: onWeights },
      folder,
      el("button", {}, "Load these weights"),
    ),
    el(
      "form",
      { onsubmit: onConfig },
      el("label", {}, "The whole configuration (JSON) ", config),
      error,
      el("button", {}, "Upgrade to this configuration"),
    ),
  );
}
