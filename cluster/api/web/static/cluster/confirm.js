// Asks before an action, and sends it.

import { el, setText } from "../lib/dom.js";
import { sendJson } from "../lib/http.js";

export function confirmAction({ path, body, title, effect, isDangerous }) {
  const error = el("p", { class: "error", role: "alert" });
  const kind = isDangerous ? "danger" : "primary";
  const yes = el("button", { type: "submit", class: kind, id: "confirm-yes" }, "Do it");
  const dialog = el(
    "dialog",
    { "aria-labelledby": "confirm-title", "aria-describedby": "confirm-effect", id: "confirm" },
    el(
      "form",
      { onsubmit },
      el("h2", { id: "confirm-title" }, title),
      el("p", { id: "confirm-effect" }, effect),
      error,
      el(
        "div",
        { class: "row" },
        yes,
        el("button", { type: "button", onclick: () => dialog.close() }, "Cancel"),
      ),
    ),
  );

  async function onsubmit(event) {
    event.preventDefault();
    yes.disabled = true;
    try {
      await sendJson(path, { key: "admin", method: "POST", body });
      dialog.close();
    } catch (refusal) {
      setText(error, refusal.message);
      yes.disabled = false;
    }
  }

  document.body.append(dialog);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.showModal();
}
