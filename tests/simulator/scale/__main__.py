"""Measures what coordinator and ingresses cost with many engines: `python -m
tests.simulator.scale`.

There is one ingress for 20 engines, with 200 requests per second. Five seconds are measured, on a
virtual clock on which coordinator, manager and ingresses take the CPU time that this machine needs
for their events (`meter.py`). An engine is killed in the middle of the measurement.
"""

from __future__ import annotations

import argparse
import gc
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

from tests.simulator.kernel.process import simulated_exits
from tests.simulator.scale.channel_costs import ChannelCosts, measure_channel
from tests.simulator.scale.meter import MeteredProcess, metered_messages
from tests.simulator.scale.plane import ScaleEngine, ScalePlane, ScaleStats
from tests.simulator.scale.traffic import Traffic

ENGINES_PER_INGRESS, RATE = 20, 200.0
MEASURED_S, WARM_UP_S, DEATH_AFTER_S = 5.0, 1.5, 2.5
_START_S = 120.0
_JOIN_STEP_S = 0.25
_SHOWN = 5
"""The maximum number of failed requests to print."""
_VIEWS = ("ClusterView", "ClusterReports", "EngineLoads")


@dataclass(frozen=True)
class Limits:
    """Limits for the largest cluster, in cores, MB per second and seconds."""

    coordinator: float = 0.5
    ingress: float = 0.7
    views_mb_s: float = 20.0
    resubmitted_s: float = 2.0


@dataclass(frozen=True)
class Result:
    engines: int
    ingresses: int
    coordinator: tuple[float, float]
    """CPU cores used by its loop and by its I/O thread."""
    ingress: tuple[float, float]
    """CPU cores of the busiest ingress: loop and I/O thread."""
    manager: float
    reports_s: float
    """Messages per second to the coordinator."""
    views_mb_s: float
    resubmitted_s: float
    """Seconds from the death of an engine to the last resubmission of a request."""
    moved: int
    first_token_ms: tuple[float, float]
    """The median and the 99th percentile."""
    requests: int
    failed: int
    joined_s: float
    """Virtual time at which all ingresses knew all engines."""

    def row(self) -> str:
        cells = (
            f"{self.engines}",
            f"{self.ingresses}",
            f"{sum(self.coordinator):.3f} ({self.coordinator[0]:.3f})",
            f"{sum(self.ingress):.3f} ({self.ingress[0]:.3f})",
            f"{self.manager:.3f}",
            f"{self.reports_s:.0f}",
            f"{self.views_mb_s:.2f}",
            f"{self.resubmitted_s:.2f} ({self.moved})",
            f"{self.first_token_ms[0]:.0f} / {self.first_token_ms[1]:.0f}",
            f"{self.requests} ({self.failed})",
            f"{self.joined_s:.1f}",
        )
        return f"| {' | '.join(cells)} |"

    def broken(self, limits: Limits) -> list[str]:
        pairs = (
            ("coordinator, cores", sum(self.coordinator), limits.coordinator),
            ("ingress, cores", sum(self.ingress), limits.ingress),
            ("views, MB/s", self.views_mb_s, limits.views_mb_s),
            ("death to the last resubmission, s", self.resubmitted_s, limits.resubmitted_s),
        )
        found = [f"{name}: {it:.2f} > {limit:g}" for name, it, limit in pairs if it > limit]
        return found + ([f"{self.failed} requests failed"] if self.failed else [])


HEAD = (
    "| engines | ingresses | coordinator, cores (loop) | busiest ingress (loop) | manager | "
    "messages/s to the coordinator | views, MB/s | death to last resubmission, s (requests) | "
    "first token p50 / p99, ms | requests (failed) | all joined, s |\n"
    "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
)


class ScaleRun:
    """A run with one cluster size."""

    def __init__(self, engines: int, seed: int, costs: ChannelCosts) -> None:
        ingresses = max(1, engines // ENGINES_PER_INGRESS)
        self._plane = ScalePlane(engines, ingresses, seed, costs)
        self._kernel = self._plane.kernel
        rate = RATE * engines / (ingresses * ENGINES_PER_INGRESS)
        self._traffic = [Traffic(self._kernel, each, rate) for each in self._plane.ingresses]

    def run(self) -> Result:
        plane, kernel = self._plane, self._kernel
        engines = plane.scenario.engines
        while plane.num_joined < engines:
            assert kernel.now < _START_S, f"{plane.num_joined} of {engines} engines have joined"
            kernel.run(kernel.now + _JOIN_STEP_S)
        joined_s, begins_s = kernel.now, kernel.now + WARM_UP_S
        gc.collect()
        gc.freeze()
        for each in self._traffic:
            each.counts_since = begins_s
            each.start(begins_s + MEASURED_S)
        kernel.run(begins_s)
        metered = [p for p in plane.ray.processes.values() if isinstance(p, MeteredProcess)]
        for process in metered:
            process.reset()
        kernel.run(begins_s + DEATH_AFTER_S)
        died_at = kernel.now
        self._busiest_engine().process.kill()
        kernel.run(begins_s + MEASURED_S)
        result = self._result(joined_s, died_at)
        plane.close()
        return result

    def _busiest_engine(self) -> ScaleEngine:
        def load(engine: ScaleEngine) -> int:
            return len(engine.server.core.scheduler.requests) if engine.server else 0

        living = [each for each in self._plane.living_engines if isinstance(each, ScaleEngine)]
        return max(living, key=load)

    def _result(self, joined_s: float, died_at: float) -> Result:
        plane = self._plane
        assert not self._kernel.failures, self._kernel.failures
        coordinator = _metered(plane.coordinators[-1][0])
        views = sum(coordinator.sent_bytes[kind] for kind in _VIEWS)
        moved = [
            at - died_at
            for each in plane.ingresses
            if isinstance(each.usage, ScaleStats)
            for at in each.usage.resubmitted_at
            if at >= died_at
        ]
        failed = [text for each in self._traffic for text in each.failed]
        for text in failed[:_SHOWN]:
            print(text)
        first_ms = [1e3 * s for each in self._traffic for s in each.first_token_s]
        cuts = quantiles(first_ms, n=100)
        return Result(
            plane.scenario.engines,
            len(plane.ingresses),
            _cores(coordinator),
            max((_cores(_metered(each.process)) for each in plane.ingresses), key=sum),
            sum(_cores(_metered(plane.manager.process))),
            coordinator.received / MEASURED_S,
            views / MEASURED_S / 1e6,
            max(moved, default=0.0),
            len(moved),
            (cuts[49], cuts[98]),
            sum(each.sent for each in self._traffic),
            len(failed),
            joined_s,
        )


def _metered(process: object) -> MeteredProcess:
    assert isinstance(process, MeteredProcess)
    return process


def _cores(process: MeteredProcess) -> tuple[float, float]:
    return process.loop_s / MEASURED_S, process.io_s / MEASURED_S


def measure(sizes: Sequence[int], seed: int) -> int:
    costs = measure_channel()
    print(f"a channel: {costs}")
    print(HEAD)
    broken: list[str] = []
    for engines in sizes:
        begun_s = time.process_time()
        with metered_messages(), simulated_exits():
            result = ScaleRun(engines, seed, costs).run()
        print(result.row(), flush=True)
        print(f"took {time.process_time() - begun_s:.0f} s", flush=True)
        broken = result.broken(Limits())
    print(*broken, sep="\n")
    return bool(broken)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    gc.disable()
    return measure(args.engines, args.seed)


if __name__ == "__main__":
    raise SystemExit(main())
