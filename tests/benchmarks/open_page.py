"""`python -m tests.benchmarks.open_page`: what an open page costs the ingress.

A cluster of nano idles, then answers short requests one after the other: first without a page, then
with the cluster view open in a headless browser. Measured is the processor time of the ingress's
process. A request's own time is what remains after the idle time is subtracted. Before the next
pair the ingress stops observing the cluster.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from swell.cluster.api.live.feed import LINGER_S
from tests.benchmarks.children import cpu_time_s
from tests.benchmarks.machine import ROOT, machine, today
from tests.faults.process import Cluster
from tests.support.web.browser import start_browser

NANO = ROOT / "configs" / "models" / "nano"
_INGRESS = "ServeReplica:swell:Ingress"
"""Part of the title of the ingress's process."""
_SETTLE_S = 3.0
_REQUESTS = 200
_BODY = {"model": "nano", "prompt": "upper: abc", "max_tokens": 4, "temperature": 0}


class Cost(NamedTuple):
    """Processor time of the ingress."""

    idle_share: float
    """Part of a core."""
    request_ms: float


def measure(cluster: Cluster, seconds: float) -> Cost:
    time.sleep(_SETTLE_S)
    ingress = cluster.named(_INGRESS)
    before_s = cpu_time_s(ingress)
    time.sleep(seconds)
    idle_share = (cpu_time_s(ingress) - before_s) / seconds
    before_s, began_s = cpu_time_s(ingress), time.monotonic()
    for _ in range(_REQUESTS):
        cluster.post("/v1/completions", _BODY).raise_for_status()
    idle_s = idle_share * (time.monotonic() - began_s)
    request_s = (cpu_time_s(ingress) - before_s - idle_s) / _REQUESTS
    return Cost(idle_share, 1e3 * request_s)


def measure_with_page(cluster: Cluster, seconds: float) -> Cost:
    with (
        tempfile.TemporaryDirectory() as profile,
        start_browser(Path(profile)) as browser,
    ):
        browser.open(f"{cluster.url}/#cluster")
        browser.until_text(".summary", "serving")
        return measure(cluster, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each idle time")
    args = parser.parse_args()
    print(f"{machine()['processor']}, {machine()['cores']} cores, {today()}")
    print(f"{'':8} {'no page':>24} {'one page':>24} {'difference':>12}")
    differences, ratios = [], []
    with Cluster(NANO, "model.dtype=float32") as cluster:
        for pair in range(args.pairs):
            if pair:
                time.sleep(LINGER_S + _SETTLE_S)
            without, with_page = (
                measure(cluster, args.seconds),
                measure_with_page(cluster, args.seconds),
            )
            differences.append(with_page.idle_share - without.idle_share)
            ratios.append(with_page.request_ms / without.request_ms)
            shown = [
                f"{cost.idle_share:6.2%} of a core, {cost.request_ms:5.2f} ms"
                for cost in (without, with_page)
            ]
            print(f"pair {pair + 1:3} {shown[0]:>24} {shown[1]:>24} {differences[-1]:12.2%}")
    print(f"an open page: {statistics.median(differences):.2%} of a core; the time of a request:")
    print(f"{statistics.median(ratios):.2f} of that without a page")


if __name__ == "__main__":
    main()
