// What an event says about the cluster, in words. Without elements of the page.

import { clock, count, plural } from "../lib/format.js";

const AWAY = "does not answer";

// What is wrong, for people: [] if nothing is. `broken` says why no events arrive.
export function problems(event, broken) {
  if (broken) return [`The page does not follow the cluster: ${broken}`];
  const { cluster, manager_error: managerError } = event;
  const known = managerError ? null : cluster;
  return [
    event.not_ready,
    managerError &&
      `The manager ${AWAY} (${managerError}). Serving goes on, but engines are neither added, ` +
        `nor removed, nor replaced.${since(event.cluster_at)}`,
    !event.coordinator_answers &&
      `The coordinator ${AWAY}. Serving goes on, but no engine joins or leaves, and the load of ` +
        "the engines is that of their last reports.",
    known?.rescale.error && `Change of engines: ${known.rescale.error}`,
    known?.upgrade.error && `Upgrade: ${known.upgrade.error}`,
    known?.pending && `Engines ${known.pending.ranks.join(", ")}: ${known.pending.reason}`,
  ].filter(Boolean);
}

function since(at) {
  return at ? ` Target, hosts and processes are those of ${clock(at)}.` : "";
}

// Why no operation can be done now; empty if each can.
export function obstacle(event, broken) {
  if (broken) return `This cannot be done now: ${broken}`;
  return event?.manager_error
    ? `This cannot be done now: the manager ${AWAY} (${event.manager_error}). It becomes ` +
        "possible when the manager answers."
    : "";
}

// The summary: [name, text].
export function facts(event) {
  const { cluster, engines, manager_error: managerError } = event;
  const active = engines.filter(({ state }) => state === "active").length;
  const known = managerError ? null : cluster;
  const hosts = new Set((cluster?.engines ?? []).map(({ node }) => node).filter(Boolean));
  return [
    ["State", known?.state ?? (event.not_ready ? "not ready" : "serving")],
    ["Engines", cluster ? `${active} of ${cluster.target}` : String(active)],
    ["Change", known ? changeText(known) : "unknown"],
    ["Epoch", count(known?.epoch)],
    ["Wave", count(known?.wave)],
    ["Hosts", String(hosts.size)],
    ["Coordinator", event.coordinator_answers ? "answers" : AWAY],
    ["Manager", managerError ? AWAY : "answers"],
  ];
}

function changeText({ rescale, upgrade }) {
  if (upgrade.phase !== "idle") return `upgrade: ${upgrade.phase}`;
  if (rescale.failures) return `${rescale.phase}, ${plural(rescale.failures, "failure")}`;
  return rescale.phase === "idle" ? "none" : rescale.phase;
}
