// The timeline of a request, drawn.

import { el, svg } from "../lib/dom.js";
import { seconds } from "../lib/format.js";

const WIDTH = 1000;
const ROW = 26;
const PHASES = {
  received: "is read and tokenized",
  routed: "travels to the engine",
  queued: "waits for a slot",
  scheduled: "prefill",
  first_token: "decode",
  preempted: "waits again",
  resubmitted: "waits for another engine",
};

// Returns the phases between the events of a choice: {from, to, event, rank, label}, in ms.
export function phasesOf({ events }) {
  return events.slice(0, -1).map((event, index) => ({
    from: event.ms,
    to: events[index + 1].ms,
    event: event.event,
    rank: event.event === "resubmitted" ? null : event.rank,
    label: PHASES[event.event] ?? event.event,
  }));
}

export function timelineElement(story) {
  const choices = story.timings.choices;
  const endMs = Math.max(1, ...choices.flatMap(({ events }) => events.map(({ ms }) => ms)));
  return el(
    "div",
    { class: "timeline" },
    ...choices.map((choice) => pictureOf(phasesOf(choice), endMs)),
    ...choices.map((choice) => tableOf(choice)),
  );
}

function pictureOf(phases, endMs) {
  const scale = (ms) => (ms / endMs) * WIDTH;
  const bars = phases.map((phase) =>
    svg(
      "rect",
      {
        class: `phase ${phase.event}`,
        x: scale(phase.from).toFixed(1),
        width: Math.max(1.5, scale(phase.to - phase.from)).toFixed(1),
        y: 0,
        height: ROW,
      },
      svg("title", {}, `${phase.label}: ${seconds((phase.to - phase.from) / 1000)}`),
    ),
  );
  const label = phases.map((one) => `${one.label} ${seconds((one.to - one.from) / 1000)}`);
  const attributes = { viewBox: `0 0 ${WIDTH} ${ROW}`, preserveAspectRatio: "none", role: "img" };
  return svg("svg", { ...attributes, "aria-label": label.join(", ") }, ...bars);
}

function tableOf(choice) {
  const phases = phasesOf(choice);
  const rows = phases.map((phase) =>
    el(
      "tr",
      {},
      el("td", {}, el("span", { class: `swatch ${phase.event}` }), phase.label),
      el("td", { class: "number" }, seconds((phase.to - phase.from) / 1000)),
      el("td", {}, phase.rank === null ? "" : `engine ${phase.rank}`),
    ),
  );
  const last = choice.events.at(-1);
  if (last?.event === "finished") {
    const total = el("td", { class: "number" }, seconds(last.ms / 1000));
    rows.push(el("tr", {}, el("td", {}, `finished: ${last.reason}`), total, el("td")));
  }
  const heads = ["Phase", "Time", "Where"].map((text) => el("th", { scope: "col" }, text));
  return el("table", {}, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...rows));
}
