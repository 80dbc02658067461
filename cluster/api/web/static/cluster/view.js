// The cluster: its state, curves, engines, log and requests, while the view is open.

import { byId, el, setText } from "../lib/dom.js";
import { clock, count, seconds } from "../lib/format.js";
import { Chart } from "./charts.js";
import { setObstacle } from "./confirm.js";
import { controlsElement } from "./controls.js";
import { EngineTable } from "./engine_table.js";
import { facts, obstacle, problems } from "./facts.js";
import { addToHistory, engineRows, newHistory } from "./history.js";
import { readLive } from "./live.js";
import { RequestList } from "./requests.js";

const SPANS = [["5 minutes", 300], ["1 hour", 3600]];
const SHORTEST_SPAN_S = 30;
const SHOWN_LOG = 100;

const history = newHistory();
let spanS = SPANS[0][1];
let end = null;
let shownLog = 0;
const parts = {};

export function openCluster() {
  parts.problems = el("div", { role: "alert", id: "problems" });
  parts.summary = el("dl", { class: "summary" });
  parts.charts = charts();
  parts.engines = new EngineTable();
  parts.log = el("ol", { class: "log", id: "log" });
  parts.requests = new RequestList();
  byId("cluster").replaceChildren(
    parts.problems,
    parts.summary,
    section("Load", spans(), chartGrid()),
    section("Engines", parts.engines.element, controlsElement(() => history.event)),
    section("What happened", logRegion()),
    section("Requests", parts.requests.element),
  );
  return { show, hide };
}

function section(title, ...children) {
  return el("section", { "aria-label": title }, el("h2", {}, title), ...children);
}

// Screen readers read new entries of a log by themselves.
function logRegion() {
  const attributes = { role: "log", tabindex: 0, "aria-label": "Log", class: "log-region" };
  return el("div", attributes, parts.log);
}

function show() {
  end ??= readLive(onEvent, onState);
  const [, kind, id] = location.hash.slice(1).split("/");
  if (kind === "requests" && id) parts.requests.show(decodeURIComponent(id));
}

function hide() {
  end?.();
  end = null;
}

function charts() {
  return [
    new Chart("Tokens per second", [
      ["generated", (one) => one.tokens_per_s],
      ["prompts", (one) => one.prompt_tokens_per_s],
    ], count),
    new Chart("Time to first token", [
      ["median", (one) => one.ttft_p50_s],
      ["p99", (one) => one.ttft_p99_s],
    ], seconds),
    new Chart("Time between tokens", [
      ["median", (one) => one.itl_p50_s],
      ["p99", (one) => one.itl_p99_s],
    ], seconds),
    new Chart("Requests", [
      ["running", (one) => one.running],
      ["waiting", (one) => one.waiting],
    ], count),
  ];
}

function chartGrid() {
  return el("div", { class: "charts" }, ...parts.charts.map(({ element }) => element));
}

function spans() {
  const attributes = { class: "row spans", role: "group", "aria-label": "Time span" };
  return el("div", attributes, ...SPANS.map(spanButton));
}

function spanButton([text, value]) {
  const onclick = () => {
    spanS = value;
    for (const one of byId("cluster").querySelectorAll(".spans button")) {
      one.setAttribute("aria-pressed", String(one === button));
    }
    drawCharts();
  };
  const button = el("button", { type: "button", class: "quiet", onclick }, text);
  button.setAttribute("aria-pressed", String(value === spanS));
  return button;
}

function onEvent(event) {
  addToHistory(history, event);
  drawProblems("");
  drawSummary(event);
  drawCharts();
  parts.engines.draw(engineRows(event), history.steps, event.cluster);
  parts.requests.draw(event.requests);
  drawLog();
}

function onState(broken) {
  if (broken === null) return;
  const again = broken.retryS === null ? "" : ` It connects again in ${seconds(broken.retryS)}.`;
  drawProblems(`${broken.reason}${again}`);
}

// `broken`: why no events arrive; empty while they do.
function drawProblems(broken) {
  const found = problems(history.event, broken);
  setObstacle(obstacle(history.event, broken));
  const text = found.join("\n");
  if (parts.problems.dataset.text === text) return;
  parts.problems.dataset.text = text;
  parts.problems.replaceChildren(...found.map((one) => el("p", { class: "error" }, one)));
}

function drawSummary(event) {
  const found = facts(event);
  if (!parts.summary.children.length) {
    const made = found.map(([name]) => el("div", {}, el("dt", {}, name), el("dd")));
    parts.summary.replaceChildren(...made);
  }
  found.forEach(([, text], index) => setText(parts.summary.children[index].lastChild, text));
}

function drawCharts() {
  const now = history.event?.at;
  if (now === undefined) return;
  const first = history.rates[0]?.at ?? now;
  const fromS = Math.max(now - spanS, Math.min(first, now - SHORTEST_SPAN_S));
  for (const chart of parts.charts) chart.draw(history.rates, fromS, now);
}

function drawLog() {
  const last = history.log.at(-1)?.at ?? 0;
  for (const { at, kind, text } of history.log.filter((one) => one.at > shownLog)) {
    const time = el("time", { class: "number" }, clock(at));
    parts.log.prepend(el("li", { "data-kind": kind }, time, " ", el("b", {}, kind), ` ${text}`));
  }
  while (parts.log.children.length > SHOWN_LOG) parts.log.lastChild.remove();
  shownLog = last;
}
