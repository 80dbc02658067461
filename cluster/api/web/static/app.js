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
  const place = byId("health");
  try {
    const response = await fetch(relative("/ready"), { cache: "no-store" });
    const body = await response.json();
    const text = response.ok ? `${plural(body.engines.length, "engine")} ready` : "not ready";
    setText(place, text);
    place.dataset.state = response.ok ? "good" : "bad";
    place.title = response.ok ? "" : body.error.message;
  } catch {
    setText(place, "no connection");
    place.dataset.state = "bad";
  }
}

window.addEventListener("hashchange", show);
show();
watchHealth();
