"""Which engines have stopped: decided by progress, never by whether a process exists. Pure.

Silent: an engine sends heartbeats from a thread of its own, whatever it computes; none for
`stall_timeout_s` means that its process does not run; one that joins is waited for three times as
long until it sends its first message. Stuck: it sends heartbeats and has work, but no
layer was computed for twice that time. A silent engine is named at once. A stuck one is named
later, because engines that compute together stop together when one of them falls silent; and of
those that are stuck together only the one that is furthest behind is named: the others wait for
it. Their reports may have come later, so that those count that are without progress for half of
that time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swell.coordinator.progress_monitor import ProgressMonitor
from swell.coordinator.wire import EngineReport

STUCK_FACTOR = 2.0
UNHEARD_FACTOR = 3.0
"""An engine that has sent nothing yet may have known another coordinator: it notices the
silence of that one, looks for this one, and connects."""


@dataclass(frozen=True)
class StalledEngine:
    """An engine that is to be replaced."""

    rank: int
    reason: str


class EngineMonitor:
    """The engines of a roster, by rank. Their counter is what they have computed, steps and layers,
    since their group has formed: some of it are older than others."""

    def __init__(self, stall_timeout_s: float, now: float) -> None:
        self._limit_s = stall_timeout_s
        self._monitor: ProgressMonitor[int] = ProgressMonitor(stall_timeout_s)
        self._monitor.advance(now)
        self._stepping: set[int] = set()
        """Engines that step together, by their newest reports."""

    def set_ranks(self, ranks: set[int], now: float) -> None:
        """Watch these engines; the time of a newcomer begins."""
        self._monitor.set_subjects(ranks, now)

    def on_hellos(self, ranks: Iterable[int], now: float) -> None:
        """These have introduced themselves to this coordinator, which counts as a first report."""
        for rank in ranks:
            if self._monitor.is_watched(rank) and self._monitor.counter(rank) is None:
                self._monitor.on_report(rank, 0, now, busy=False)

    def on_report(self, report: EngineReport, now: float, is_stepping: bool = False) -> None:
        """`is_stepping`: it has work even without requests, because it steps with others."""
        if self._monitor.is_watched(report.rank):
            counter = report.progress_counter - report.progress_at_forming
            busy = is_stepping or bool(report.running + report.waiting)
            self._monitor.on_report(report.rank, counter, now, busy)
            (self._stepping.add if is_stepping else self._stepping.discard)(report.rank)

    def check(self, now: float, exempt: frozenset[int] = frozenset()) -> list[StalledEngine]:
        """Engines that have stopped; called once all reports have been taken in. The `exempt` may
        be without progress."""
        self._monitor.advance(now)
        self._monitor.excuse(exempt)
        silent = {
            rank: time_s
            for rank, time_s in self._monitor.silent_s(self._limit_s).items()
            if self._monitor.counter(rank) is not None or time_s > UNHEARD_FACTOR * self._limit_s
        }
        if silent:
            return [
                StalledEngine(rank, f"engine {rank} was silent for {time_s:.1f} s")
                for rank, time_s in silent.items()
            ]
        stuck = self._monitor.without_progress_s(STUCK_FACTOR * self._limit_s)
        if not stuck:
            return []
        if self._stepping & stuck.keys():  # reports of the others may have come later
            stuck |= self._stepping_without_progress()
        behind = min(stuck, key=self._monitor.counter)
        self._monitor.excuse(stuck)  # the others waited for it: now they have their time
        reason = f"engine {behind} had work but no progress for {stuck[behind]:.1f} s"
        return [StalledEngine(behind, reason)]

    def _stepping_without_progress(self) -> dict[int, float]:
        """Engines that step together stop together: their reports show which one it is."""
        without = self._monitor.without_progress_s(self._limit_s)
        return {rank: time_s for rank, time_s in without.items() if rank in self._stepping}
