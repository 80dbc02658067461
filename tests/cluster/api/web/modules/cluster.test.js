import assert from "node:assert/strict";
import { test } from "node:test";
import {
  RESUME, WAKE, drainAction, pauseAction, scaleAction, sleepAction, upgradeAction, weightsAction,
} from "./static/cluster/actions.js";
import { niceTop, pathOf, thinned } from "./static/cluster/charts.js";
import { workerText } from "./static/cluster/engine_table.js";
import { facts, obstacle, problems } from "./static/cluster/facts.js";
import { addToHistory, engineRows, newHistory } from "./static/cluster/history.js";
import { phasesOf } from "./static/cluster/timeline.js";

const engine = (rank, more = {}) => ({ rank, state: "active", running: 1, waiting: 0, steps: 0, ...more });
const event = (at, more = {}) => ({ at, engines: [], cluster: null, rates: [{ at }], log: [], requests: [], ...more });

test("a repeated event adds nothing", () => {
  const history = newHistory();
  const entry = { at: 2, kind: "died", text: "x" };
  addToHistory(history, event(1));
  addToHistory(history, event(2, { log: [entry] }));
  addToHistory(history, event(2, { rates: [{ at: 1 }, { at: 2 }], log: [entry] }));
  assert.deepEqual([history.rates.length, history.log.length], [2, 1]);
});

test("an hour of samples is kept", () => {
  const history = newHistory();
  for (let at = 1; at <= 4000; at += 1) addToHistory(history, event(at));
  assert.deepEqual([history.rates.length, history.rates[0].at], [3600, 401]);
});

test("steps per second are those of the same engine", () => {
  const history = newHistory();
  addToHistory(history, event(1, { engines: [engine(0, { steps: 10 }), engine(1, { steps: 90 })] }));
  addToHistory(history, event(3, { engines: [engine(0, { steps: 30 }), engine(1, { steps: 5 })] }));
  assert.deepEqual([...history.steps], [[0, 10]], "engine 1 was replaced");
});

test("engines are shown that only the ingress or only the manager knows", () => {
  const managed = { rank: 2, state: "starting", pid: 7, node: "n", workers: [{ pid: 8 }], version: "v" };
  const rows = engineRows(event(1, { engines: [engine(0)], cluster: { engines: [managed] } }));
  assert.deepEqual(rows.map(({ rank, state, pid }) => [rank, state, pid]), [[0, "active", null], [2, "starting", 7]]);
  assert.deepEqual(engineRows(event(1, { engines: [engine(0)] })).map(({ rank }) => rank), [0]);
});

const healthy = { coordinator: {}, rescale: { phase: "idle" }, upgrade: { phase: "idle" }, engines: [], state: "serving", target: 2 };
const answering = { cluster: healthy, cluster_at: 1, manager_error: null, coordinator_answers: true, not_ready: null };

test("workers are shown as their engine reports them, also while it starts", () => {
  const workers = [{ status: "ready", pid: 9, replaced: 1 }];
  const managed = { rank: 0, state: "active", pid: 7, workers: [{ status: "ready", pid: 8, replaced: 0 }] };
  const starting = { rank: 1, state: "starting", pid: null, workers: [{ status: "loading", pid: 0, replaced: 0 }], starting: "capturing steps, 3 of 35" };
  const rows = engineRows(event(1, { engines: [engine(0, { workers })], cluster: { engines: [managed, starting] } }));
  assert.deepEqual(rows.map((row) => row.workers[0].pid), [9, 0]);
  assert.deepEqual(rows.map((row) => row.detail), ["", "capturing steps, 3 of 35"]);
  const texts = rows.map((row) => workerText(row.workers[0], 0, row.pid));
  assert.deepEqual(texts, ["0 ready · process 9 · replaced once", "0 loading"]);
  assert.equal(workerText({ status: "ready", pid: 7, replaced: 0 }, 0, 7), "0 ready");
});

test("a sleeping engine is shown as its engine reports it, also while the manager is away", () => {
  const asleep = engine(0, { sleep_level: 2 });
  const managed = { rank: 0, state: "active", pid: 7, workers: [] };
  for (const manager_error of [null, "gone"]) {
    const [row] = engineRows(event(1, { engines: [asleep], cluster: { engines: [managed] }, manager_error }));
    assert.deepEqual([row.state, row.detail], ["asleep", "level 2"]);
  }
  const leaving = engineRows(event(1, { engines: [engine(0, { state: "leaving", sleep_level: 1 })] }));
  assert.deepEqual([leaving[0].state, leaving[0].detail], ["leaving", "asleep, level 1"]);
});

test("problems are named, and a cluster without any has none", () => {
  assert.deepEqual(problems(event(1, answering), ""), []);
  const away = { ...answering, manager_error: "gone", coordinator_answers: false, not_ready: "no engine" };
  assert.equal(problems(event(1, away), "").length, 3);
  assert.match(problems(null, "it is gone")[0], /does not follow the cluster: it is gone/);
});

test("what only the manager knows is not shown as the present while it is away", () => {
  const engines = [{ rank: 1, state: "active", workers: [] }];
  const away = { ...answering, cluster: { ...healthy, engines, state: "changing" }, manager_error: "gone" };
  const shown = new Map(facts(event(1, { ...away, engines: [engine(0)] })));
  assert.deepEqual(["State", "Engines", "Change", "Manager"].map((name) => shown.get(name)), ["serving", "1 of 2", "unknown", "does not answer"]);
  assert.equal(engineRows(event(1, away))[0].state, "lost");
});

test("an operation waits for the manager and for the stream", () => {
  assert.equal(obstacle(event(1, answering), ""), "");
  assert.match(obstacle(event(1, { ...answering, manager_error: "gone" }), ""), /the manager does not answer \(gone\)/);
  assert.match(obstacle(null, "it is gone"), /it is gone/);
});

test("a confirmation states the effect", () => {
  const now = event(1, { engines: [engine(0), engine(1)], cluster: { target: 2 } });
  assert.match(scaleAction(now, 4).effect, /^2 engines will start/);
  assert.equal(scaleAction(now, 4).isDangerous, false);
  assert.match(scaleAction(now, 1).effect, /^1 engine will get no new requests/);
  assert.match(drainAction(1, now.cluster).effect, /The target becomes 1 engine\./);
  assert.match(pauseAction(now).effect, /^2 running requests/);
  assert.match(sleepAction(1).effect, /the weights move to host memory\. Requests wait for a wake-up/);
  assert.match(sleepAction(2).effect, /Requests wait for a wake-up, which reads the weights/);
  assert.match(weightsAction("/w").effect, /load the weights of \/w, and join again/);
  assert.match(upgradeAction({}).effect, /the change is rolled back/);
  for (const action of [RESUME, WAKE]) assert.equal(action.isDangerous, false);
});

test("a curve has gaps where nothing was measured", () => {
  const dots = "M0.0 83.0h0M320.0 2.0h0"; // a browser draws nothing of a path that only moves
  assert.equal(pathOf([[0, 0], [0.5, null], [1, 10]], 10), dots);
  assert.equal(pathOf([[0, 0], [1, 10]], 10), "M0.0 83.0h0L320.0 2.0");
  assert.deepEqual([0, 0.3, 1, 11, 250, NaN].map(niceTop), [1, 0.5, 1, 20, 500, 1]);
  const many = Array.from({ length: 1000 }, (_, at) => ({ at }));
  assert.equal(thinned(many, 300).at(-1).at, 999);
  assert.ok(thinned(many, 300).length <= 300);
});

test("phases lie between the events", () => {
  const events = [
    { event: "received", ms: 0, rank: null },
    { event: "first_token", ms: 4, rank: 0 },
    { event: "resubmitted", ms: 9, rank: 0 },
    { event: "finished", ms: 20, rank: 1 },
  ];
  const found = phasesOf({ events }).map(({ event: name, from, to, rank }) => [name, from, to, rank]);
  assert.deepEqual(found, [["received", 0, 4, null], ["first_token", 4, 9, 0], ["resubmitted", 9, 20, null]]);
});
