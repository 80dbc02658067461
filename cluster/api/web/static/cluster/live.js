// The stream of events about the cluster: it reconnects by itself, with growing pauses.

import { send } from "../lib/http.js";
import { eventsOf } from "../lib/sse.js";

const STREAM_S = 3600;
const FIRST_PAUSE_S = 1;
const LONGEST_PAUSE_S = 30;

// Calls `onEvent` with each event, and `onState` with null while the stream is open, else with the
// reason and the seconds until the next attempt. Returns a function that ends the stream.
export function readLive(onEvent, onState) {
  const ending = new AbortController();
  follow(onEvent, onState, ending.signal);
  return () => ending.abort();
}

async function follow(onEvent, onState, signal) {
  let pauseS = FIRST_PAUSE_S;
  while (!signal.aborted) {
    let reason = "The stream has ended.";
    try {
      const path = `/admin/events?seconds=${STREAM_S}`;
      for await (const { data } of eventsOf(await send(path, { key: "admin", signal }))) {
        if (data === undefined) continue;
        pauseS = FIRST_PAUSE_S;
        onState(null);
        onEvent(JSON.parse(data));
      }
    } catch (error) {
      if (signal.aborted) return;
      reason = error.message;
      if (error.status === 401 || error.status === 403) {
        onState({ reason, retryS: null });
        return;
      }
    }
    onState({ reason, retryS: pauseS });
    await pause(pauseS * 1000, signal);
    pauseS = Math.min(LONGEST_PAUSE_S, pauseS * 2);
  }
}

function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
