// The newest requests, and the timeline of one of them.

import { el, setText } from "../lib/dom.js";
import { clock, seconds } from "../lib/format.js";
import { sendJson } from "../lib/http.js";
import { timelineElement } from "./timeline.js";

const HEADS = ["Received", "Request", "Model", "Time", "Engines"];
const TABLE = "Table of requests";

export class RequestList {
  #drawn = "";
  #body = el("tbody");
  #place = el("div", { class: "story", "aria-live": "polite" });

  constructor() {
    const input = el("input", { "aria-label": "Id of a request", placeholder: "Id of a request" });
    const onsubmit = (event) => {
      event.preventDefault();
      if (input.value.trim()) this.show(input.value.trim());
    };
    const heads = HEADS.map((text) => el("th", { scope: "col" }, text));
    const table = el("table", {}, el("thead", {}, el("tr", {}, ...heads)), this.#body);
    this.element = el(
      "div",
      {},
      el("form", { class: "row find", onsubmit }, input, el("button", {}, "Show its timeline")),
      this.#place,
      el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": TABLE }, table),
    );
  }

  draw(requests) {
    const key = JSON.stringify(requests);
    if (key === this.#drawn) return;
    this.#drawn = key;
    this.#body.replaceChildren(...requests.map((one) => this.#row(one)));
  }

  #row({ id, model, received_at: at, duration_s: duration, running, ranks }) {
    const onclick = () => this.show(id);
    return el(
      "tr",
      {},
      el("td", { class: "number" }, clock(at)),
      el("td", {}, el("button", { type: "button", class: "quiet id", onclick }, id)),
      el("td", {}, model),
      el("td", { class: "number" }, running ? "runs" : seconds(duration)),
      el("td", {}, ranks.join(" → ")),
    );
  }

  async show(id) {
    this.#place.replaceChildren(el("p", { class: "meta" }, `Reads the timeline of ${id}.`));
    try {
      const path = `/admin/requests/${encodeURIComponent(id)}`;
      const { requests } = await sendJson(path, { key: "admin" });
      this.#place.replaceChildren(...requests.map(storyElement));
    } catch (error) {
      setText(this.#place, "");
      this.#place.append(el("p", { class: "error" }, error.message));
    }
  }
}

function storyElement(story) {
  const state = story.running ? "runs" : "finished";
  const title = `${story.id} · ${story.model} · ${state}`;
  return el("section", {}, el("h3", {}, title), timelineElement(story));
}
