"""Which engines have stopped: decided by progress, never by whether a process exists. Pure.

Silent: an engine sends heartbeats from a thread of its own, whatever it computes; none for
`stall_timeout_s` means that its process does not run. Stuck: it is heard of and has work, but no
layer was computed for twice that time. A silent engine is named at once. A stuck one is named
later, because engines that compute together stop together when one of them falls silent; and of
those that are stuck together only the one that is furthest behind is named: the others wait for
it.
"""

from __future__ import annotations

from dataclasses import dataclass

from swell.coordinator.progress_monitor import ProgressMonitor
from swell.coordinator.wire import EngineReport

_STUCK_FACTOR = 2.0


@dataclass(frozen=True)
class StalledEngine:
    """An engine that is to be replaced."""

    rank: int
    reason: str


class EngineMonitor:
    """The engines of a roster, by rank. Their counter is (steps, layers)."""

    def __init__(self, stall_timeout_s: float, now: float) -> None:
        self._limit_s = stall_timeout_s
        self._monitor: ProgressMonitor[int] = ProgressMonitor(stall_timeout_s)
        self._monitor.advance(now)

    def set_ranks(self, ranks: set[int], now: float) -> None:
        """Watch these engines; a newcomer has the full time to be heard."""
        self._monitor.set_subjects(ranks, now)

    def on_report(self, report: EngineReport, now: float) -> None:
        if report.rank in self._monitor.subjects:
            counter = (report.steps, report.progress_counter)
            self._monitor.on_report(
                report.rank, counter, now, bool(report.running + report.waiting)
            )

    def check(self, now: float, exempt: frozenset[int] = frozenset()) -> list[StalledEngine]:
        """Engines that have stopped; called once all reports have been taken in. The `exempt` may
        be without progress."""
        self._monitor.advance(now)
        self._monitor.excuse(exempt)
        silent = self._monitor.silent_s(self._limit_s)
        if silent:
            return [
                StalledEngine(rank, f"engine {rank} was silent for {time_s:.1f} s")
                for rank, time_s in silent.items()
            ]
        stuck = self._monitor.without_progress_s(_STUCK_FACTOR * self._limit_s)
        if not stuck:
            return []
        behind = min(stuck, key=self._monitor.counter)
        self._monitor.excuse(stuck)  # the others waited for it: now they have their time
        reason = f"engine {behind} had work but no progress for {stuck[behind]:.1f} s"
        return [StalledEngine(behind, reason)]
