// Asks for a key of the server.

import { el } from "./dom.js";

const TEXTS = {
  user: ["This server needs a key", "A key of serve.api_keys_file."],
  admin: ["The cluster needs an operator's key", "A key of serve.admin_keys_file."],
};
const open = {};
let last = Promise.resolve();

// Resolves to the key, or to null if the dialog was cancelled. Requests that need the same key at
// the same time share one dialog.
export function askForKey(kind, refusal) {
  open[kind] ??= (last = last.then(() => ask(kind, refusal))).finally(() => {
    open[kind] = undefined;
  });
  return open[kind];
}

function ask(kind, refusal) {
  const [title, hint] = TEXTS[kind];
  const input = el("input", { type: "password", autocomplete: "off", spellcheck: "false" });
  const dialog = el(
    "dialog",
    { "aria-labelledby": "key-title", id: "key-dialog" },
    el(
      "form",
      { onsubmit: (event) => (event.preventDefault(), dialog.close(input.value.trim())) },
      el("h2", { id: "key-title" }, title),
      el("p", {}, `${hint} It stays in this page's memory until you reload.`),
      el("p", { class: "error", role: "alert" }, refusal),
      el("label", {}, "Key ", input),
      el(
        "div",
        { class: "row" },
        el("button", { type: "submit", class: "primary" }, "Use this key"),
        el("button", { type: "button", onclick: () => dialog.close("") }, "Cancel"),
      ),
    ),
  );
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue || null);
    });
  });
}
