// What operators can do, and what will then happen, in words. Without elements of the page.

import { plural } from "../lib/format.js";

// Each action: path, body, title, and the sentences of its confirmation.
export function scaleAction(event, engines) {
  const target = event.cluster?.target ?? event.engines.length;
  const more = engines - target;
  const effect =
    more > 0
      ? `${plural(more, "engine")} will start, and join once the model is loaded.`
      : `${plural(-more, "engine")} will get no new requests, finish the current ones within the ` +
        "drain timeout, hand over the rest, and stop.";
  return {
    path: "/admin/scale",
    body: { engines },
    title: `Scale from ${target} to ${plural(engines, "engine")}?`,
    effect,
    isDangerous: engines < target,
  };
}

export function drainAction(rank, { target } = {}) {
  return {
    path: "/admin/drain",
    body: { rank },
    title: `Drain engine ${rank}?`,
    effect:
      `Engine ${rank} will get no new requests, finish its current ones, hand over the rest, and ` +
      `stop.${target === undefined ? "" : ` The target becomes ${plural(target - 1, "engine")}.`}`,
    isDangerous: true,
  };
}

export function pauseAction(event) {
  const running = event.engines.reduce((sum, engine) => sum + engine.running, 0);
  return {
    path: "/admin/pause",
    body: {},
    title: "Pause all engines?",
    effect:
      `${plural(running, "running request")} will stop where they are, and new ones wait, until ` +
      "you resume. No request is lost.",
    isDangerous: true,
  };
}

export const RESUME = {
  path: "/admin/resume",
  body: {},
  title: "Resume all engines?",
  effect: "Paused requests continue where they stopped.",
  isDangerous: false,
};

export function sleepAction(level) {
  return {
    path: "/admin/sleep",
    body: { level },
    title: `Put all engines to sleep (level ${level})?`,
    effect:
      level === 1
        ? "The KV cache is freed, and the weights move to host memory. Requests wait for a wake-up."
        : "KV cache and weights are freed. Requests wait for a wake-up, which reads the weights.",
    isDangerous: true,
  };
}

export const WAKE = {
  path: "/admin/wake",
  body: {},
  title: "Wake up all engines?",
  effect: "The engines restore their memory, and continue with the requests that wait.",
  isDangerous: false,
};

export function weightsAction(path) {
  return {
    path: "/admin/update_weights",
    body: { path },
    title: "Load other weights?",
    effect:
      `One engine after the other will leave, load the weights of ${path}, and join again. ` +
      "Answers that have begun finish with the weights that they began with.",
    isDangerous: true,
  };
}

export function upgradeAction(config) {
  return {
    path: "/admin/upgrade",
    body: { config },
    title: "Upgrade to another configuration?",
    effect:
      "Engines of the new configuration will replace the current ones, one after the other. " +
      "If they do not start, the change is rolled back.",
    isDangerous: true,
  };
}
