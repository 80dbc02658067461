// Asks before an action, and sends it.

import { el, setText } from "../lib/dom.js";
import { sendJson } from "../lib/http.js";

let obstacle = "";
let showObstacle = () => {};

// `text` says why no action can be done now; empty: each can. An open dialog waits for that.
export function setObstacle(text) {
  obstacle = text;
  showObstacle();
}

export function confirmAction({ path, body, title, effect, isDangerous }) {
  let isSending = false;
  const state = el("p", { class: "notice", role: "status", id: "confirm-state" });
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
      state,
      error,
      el(
        "div",
        { class: "row" },
        yes,
        el("button", { type: "button", onclick: () => dialog.close() }, "Cancel"),
      ),
    ),
  );

  function draw() {
    yes.disabled = isSending || obstacle !== "";
    setText(state, isSending ? "Sent. The manager has not answered yet." : obstacle);
  }

  async function onsubmit(event) {
    event.preventDefault();
    if (yes.disabled) return;
    isSending = true;
    setText(error, "");
    draw();
    try {
      await sendJson(path, { key: "admin", method: "POST", body });
      dialog.close();
    } catch (refusal) {
      setText(error, refusal.message);
      isSending = false;
      draw();
    }
  }

  showObstacle = draw;
  draw();
  document.body.append(dialog);
  dialog.addEventListener("close", () => {
    showObstacle = () => {};
    dialog.remove();
  });
  dialog.showModal();
}
