"""Detects engines that have stopped, by their progress, not by whether a process exists. Pure.

An engine is silent if it has sent no heartbeat for `stall_timeout_s`: it sends heartbeats from a
separate thread, independent of its computation, so its process does not run. A joining engine has
three times as long to send its first message. An engine is stuck if it sends heartbeats and has
work, but computed no layer for twice `stall_timeout_s`. A silent engine is reported at once. A
stuck engine is reported later, because engines that compute together stop together when one of them
becomes silent. If several engines are stuck together, only the one with the least progress is
reported: the others wait for it. Their last reports may have been later, so engines without
progress for half of that time are compared, too.
"""

from __future__ import annotations

from collections.abc import Iterable

from swell.coordinator.monitors.progress_monitor import ProgressMonitor
from swell.coordinator.wire import EngineReport

STUCK_FACTOR = 2.0
UNHEARD_FACTOR = 3.0
"""An engine that has not sent anything yet may have known another coordinator: it must notice the
silence of that one, find this one, and connect."""


class EngineMonitor:
    """Monitors the engines of a roster, by rank. The counter is the number of steps and layers
    computed since the group was formed, because some engines are older than others."""

    def __init__(self, stall_timeout_s: float, now: float) -> None:
        self._limit_s = stall_timeout_s
        self._monitor: ProgressMonitor[int] = ProgressMonitor(stall_timeout_s)
        self._monitor.advance(now)
        self._stepping: set[int] = set()
        """Engines that step together, by their newest reports."""

    def set_ranks(self, ranks: set[int], now: float) -> None:
        """Monitors these engines. The silence of an engine that is new here is counted from now."""
        self._monitor.set_subjects(ranks, now)

    def on_hellos(self, ranks: Iterable[int], now: float) -> None:
        """Records that these engines have introduced themselves to this coordinator, which counts
        as a first report."""
        for rank in ranks:
            if self._monitor.is_watched(rank) and self._monitor.counter(rank) is None:
                self._monitor.on_report(rank, 0, now, busy=False)

    def on_report(self, report: EngineReport, now: float, is_stepping: bool = False) -> None:
        """Records a report. `is_stepping`: the engine has work even without requests, because it
        steps with others."""
        if self._monitor.is_watched(report.rank):
            counter = report.progress_counter - report.progress_at_forming
            busy = is_stepping or bool(report.running + report.waiting)
            self._monitor.on_report(report.rank, counter, now, busy)
            (self._stepping.add if is_stepping else self._stepping.discard)(report.rank)

    def check(self, now: float, exempt: frozenset[int] = frozenset()) -> dict[int, str]:
        """Returns engines that have stopped: rank -> why they must be replaced. Call it after all
        reports were recorded. `exempt` engines may be without progress."""
        self._monitor.advance(now)
        self._monitor.excuse(exempt)
        silent = {
            rank: time_s
            for rank, time_s in self._monitor.silent_s(self._limit_s).items()
            if self._monitor.counter(rank) is not None or time_s > UNHEARD_FACTOR * self._limit_s
        }
        if silent:
            return {
                rank: f"engine {rank} sent no report for {time_s:.1f} s"
                for rank, time_s in silent.items()
            }
        stuck = self._monitor.without_progress_s(STUCK_FACTOR * self._limit_s)
        if not stuck:
            return {}
        if self._stepping & stuck.keys():  # reports of the others may be later
            stuck |= self._stepping_without_progress()
        behind = min(stuck, key=self._monitor.counter)
        self._monitor.excuse(stuck)  # the others waited for it: their time restarts
        reason = f"engine {behind} had work but made no progress for {stuck[behind]:.1f} s"
        return {behind: reason}

    def _stepping_without_progress(self) -> dict[int, float]:
        """Returns engines that step together and make no progress: their reports show which one is
        the cause."""
        without = self._monitor.without_progress_s(self._limit_s)
        return {rank: time_s for rank, time_s in without.items() if rank in self._stepping}
