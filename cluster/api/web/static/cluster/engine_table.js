// The table of engines: rows are kept, so that only what differs is written.

import { el, setText } from "../lib/dom.js";
import { count, percent } from "../lib/format.js";
import { drainAction } from "./actions.js";
import { confirmAction } from "./confirm.js";

const SHOWN_NODE = 8; // hexadecimal digits of Ray's id of a host
const STATES = { active: "good", leaving: "warn", repairing: "warn", asleep: "", starting: "warn" };
const WORKERS = { ready: "good", loading: "warn", lost: "bad" };
const HEADS = [
  ["Engine"], ["State"], ["Host"], ["Running", "number"], ["Waiting", "number"], ["KV cache"],
  ["Prefix hits", "number"], ["Steps/s", "number"], ["Epoch", "number"], ["Wave", "number"],
  ["Version"], ["Process", "number"], ["Workers"], [""],
];

export class EngineTable {
  #rows = new Map();
  #body = el("tbody");
  #cluster = null;

  constructor() {
    const heads = HEADS.map(([text, kind]) =>
      el("th", { scope: "col", class: kind }, text || el("span", { class: "unseen" }, "Actions")),
    );
    const table = el("table", {}, el("thead", {}, el("tr", {}, ...heads)), this.#body);
    const attributes = { class: "scroll", tabindex: 0, role: "region" };
    this.element = el("div", { ...attributes, "aria-label": "Table of engines" }, table);
  }

  draw(rows, steps, cluster) {
    this.#cluster = cluster;
    const ranks = new Set(rows.map(({ rank }) => rank));
    for (const [rank, row] of this.#rows) {
      if (!ranks.has(rank)) {
        row.element.remove();
        this.#rows.delete(rank);
      }
    }
    rows.forEach((engine, index) => {
      const row = this.#rows.get(engine.rank) ?? this.#add(engine.rank);
      if (this.#body.children[index] !== row.element) {
        this.#body.insertBefore(row.element, this.#body.children[index] ?? null);
      }
      row.draw(engine, steps.get(engine.rank));
    });
  }

  #add(rank) {
    const row = new EngineRow(rank, () => confirmAction(drainAction(rank, this.#cluster ?? {})));
    this.#rows.set(rank, row);
    return row;
  }
}

class EngineRow {
  constructor(rank, onDrain) {
    this.cells = HEADS.map(([, kind]) => el("td", { class: kind }));
    this.cells[0].textContent = String(rank);
    this.state = el("span", { class: "state" });
    this.detail = el("span", { class: "meta" });
    this.cells[1].append(this.state, " ", this.detail);
    this.workers = el("ul", { class: "workers", "aria-label": `Workers of engine ${rank}` });
    this.cells[12].append(this.workers);
    this.meter = el("meter", { min: 0, max: 1, "aria-label": `KV cache of engine ${rank}` });
    this.usage = el("span", { class: "number" });
    this.cells[5].append(this.meter, " ", this.usage);
    const drain = el("button", { type: "button", class: "quiet", onclick: onDrain }, "Drain");
    drain.setAttribute("aria-label", `Drain engine ${rank}`);
    this.cells.at(-1).append(drain);
    this.element = el("tr", { "data-rank": rank }, ...this.cells);
  }

  draw(engine, stepsPerS) {
    setText(this.state, engine.state);
    this.state.dataset.state = STATES[engine.state] ?? "bad";
    this.meter.value = engine.kvUsage;
    setText(this.usage, percent(engine.kvUsage));
    setText(this.detail, engine.detail);
    this.#drawWorkers(engine);
    const texts = {
      2: engine.node?.slice(0, SHOWN_NODE) ?? "–",
      3: count(engine.running),
      4: count(engine.waiting),
      6: percent(engine.hitRate),
      7: count(stepsPerS),
      8: count(engine.epoch),
      9: count(engine.wave),
      10: engine.version || "–",
      11: engine.pid ? String(engine.pid) : "–",
    };
    this.cells[2].title = engine.node ?? "";
    for (const [index, text] of Object.entries(texts)) setText(this.cells[index], text);
  }

  #drawWorkers({ workers, pid, state }) {
    const shown = state === "lost" ? [] : workers;
    while (this.workers.children.length > shown.length) this.workers.lastChild.remove();
    shown.forEach((worker, rank) => {
      const item = this.workers.children[rank] ?? el("li", { class: "worker" });
      if (!item.isConnected) this.workers.append(item);
      item.dataset.state = WORKERS[worker.status];
      setText(item, workerText(worker, rank, pid));
    });
  }
}

// A worker without a process of its own has that of the engine.
export function workerText({ status, pid, replaced }, rank, enginePid) {
  const process = pid && pid !== enginePid ? ` · process ${pid}` : "";
  const earlier = replaced ? ` · replaced ${replaced === 1 ? "once" : `${replaced} times`}` : "";
  return `${rank} ${status}${process}${earlier}`;
}
