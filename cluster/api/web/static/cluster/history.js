// What the page has seen of the cluster. Without elements of the page.

const MAX_SAMPLES = 3600;
const MAX_LOG = 300;

export function newHistory() {
  return { event: null, rates: [], log: [], steps: new Map() };
}

// Adds an event. An event may repeat samples and entries that are known already.
export function addToHistory(history, event) {
  const { rates, log } = history;
  const lastRate = rates.at(-1)?.at ?? 0;
  const lastLog = log.at(-1)?.at ?? 0;
  rates.push(...event.rates.filter((one) => one.at > lastRate));
  log.push(...event.log.filter((one) => one.at > lastLog));
  rates.splice(0, rates.length - MAX_SAMPLES);
  log.splice(0, log.length - MAX_LOG);
  history.steps = stepRates(history.event, event);
  history.event = event;
}

// Steps per second of each engine, by rank.
function stepRates(before, after) {
  const found = new Map();
  const elapsed = before ? after.at - before.at : 0;
  for (const engine of after.engines) {
    const known = before?.engines.find(({ rank }) => rank === engine.rank);
    if (known && elapsed > 0 && engine.steps >= known.steps) {
      found.set(engine.rank, (engine.steps - known.steps) / elapsed);
    }
  }
  return found;
}

// Joins what the ingress sees of an engine with what the manager knows of it. The manager's answer
// may be old: an engine that only this answer has is gone.
export function engineRows({ engines, cluster, manager_error: isOld }) {
  const live = new Map(engines.map((engine) => [engine.rank, engine]));
  const known = new Map((cluster?.engines ?? []).map((engine) => [engine.rank, engine]));
  const ranks = [...new Set([...live.keys(), ...known.keys()])].sort((a, b) => a - b);
  return ranks.map((rank) => {
    const seen = live.get(rank);
    const managed = known.get(rank);
    return {
      rank,
      state: stateOf(seen, managed, isOld),
      node: managed?.node ?? null,
      workers: seen?.workers?.length ? seen.workers : (managed?.workers ?? []),
      detail: detailOf(seen, managed),
      pid: managed?.pid ?? null,
      version: seen?.version || managed?.version || "",
      running: seen?.running ?? 0,
      waiting: seen?.waiting ?? 0,
      kvUsage: seen?.kv_usage ?? 0,
      hitRate: seen?.prefix_queries ? seen.prefix_hits / seen.prefix_queries : null,
      epoch: seen?.epoch ?? null,
      wave: seen?.wave ?? null,
    };
  });
}

function stateOf(seen, managed, isOld) {
  if (!seen) return isOld ? "lost" : managed.state;
  return seen.sleep_level && seen.state === "active" ? "asleep" : seen.state;
}

// What the state does not say: what a starting engine does, and how deeply an engine sleeps.
function detailOf(seen, managed) {
  if (!seen) return managed.starting ?? "";
  if (!seen.sleep_level) return "";
  return `${seen.state === "active" ? "" : "asleep, "}level ${seen.sleep_level}`;
}
