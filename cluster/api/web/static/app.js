// The page: shows one view at a time, named by the fragment of the address.

import { byId, setText } from "./lib/dom.js";
import { relative } from "./lib/http.js";
import { plural } from "./lib/format.js";
import { openCluster } from "./cluster/view.js";
import { openPlayground } from "./playground/playground.js";

const VIEWS = { playground: openPlayground, cluster: openCluster };
const HEALTH_PAUSE_MS = 5_000;
const opened = {};

function show() {
  const [asked] = location.hash.slice(1).split("/");
  const name = asked in VIEWS ? asked : "playground";
  for (const view of Object.keys(VIEWS)) {
    byId(view).hidden = view !== name;
    const tab = byId(`tab-${view}`);
    if (view === name) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
    if (view !== name) opened[view]?.hide?.();
  }
  opened[name] ??= VIEWS[name]();
  opened[name].show?.();
}

// Shows whether an engine can make progress. A hidden page asks nothing.
async function watchHealth() {
  for (;;) {
    if (!document.hidden) await showHealth();
    await new Promise((resolve) => setTimeout(resolve, HEALTH_PAUSE_MS));
  }
}

async function showHealth() {
  try {
    const response = await fetch(relative("/ready"), { cache: "no-store" });
    const body = await response.json();
    if (response.ok) drawHealth("good", `${plural(body.engines.length, "engine")} ready`, "");
    else drawHealth("bad", "not ready", `Nothing is computed now: ${body.error.message}.`);
  } catch {
    drawHealth("bad", "no connection", "The server does not answer.");
  }
}

function drawHealth(state, text, reason) {
  setText(byId("health"), text);
  byId("health").dataset.state = state;
  setText(byId("waiting"), reason && `${reason} The page looks again every 5 seconds.`);
}

window.addEventListener("hashchange", show);
show();
watchHealth();
