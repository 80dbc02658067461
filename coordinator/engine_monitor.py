"""Who has stopped: decided by progress, never by whether a process exists. Pure.

Silent: an engine beats from a thread of its own, whatever it computes; no beat for
`stall_timeout_s` means that its process does not run. Stuck: it beats and has work, but no layer
was computed for twice that time. The first is told at once. The second waits longer, because
engines that compute together stop together when one of them falls silent; and of those that are
stuck together only the one that is furthest behind is named: the others wait for it.

Both are measured in time in which the coordinator listened (`coordinator/listening_clock.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from swell.coordinator.listening_clock import ListeningClock
from swell.coordinator.wire import EngineReport

_STUCK_FACTOR = 2.0


@dataclass
class _EngineProgress:
    """What is known of one engine; times are those of a `ListeningClock`."""

    reported_at: float
    progressed_at: float
    progress_counter: int = 0
    steps: int = 0
    busy: bool = False


@dataclass(frozen=True)
class StalledEngine:
    """An engine that is to be replaced."""

    rank: int
    reason: str


class EngineMonitor:
    """Pulses of the engines of a roster."""

    def __init__(self, stall_timeout_s: float, now: float) -> None:
        self._limit_s = stall_timeout_s
        self._progress: dict[int, _EngineProgress] = {}
        self._clock = ListeningClock(stall_timeout_s)
        self._clock.advance(now)

    def set_ranks(self, ranks: set[int], now: float) -> None:
        """Watch these engines; a newcomer is given the full time to be heard."""
        now = self._clock.read(now)
        self._progress = {
            rank: self._progress.get(rank) or _EngineProgress(now, now) for rank in ranks
        }

    def on_report(self, report: EngineReport, now: float) -> None:
        engine = self._progress.get(report.rank)
        if engine is None:
            return
        now = self._clock.read(now)
        busy = bool(report.running or report.waiting)
        if report.progress_counter != engine.progress_counter or not (busy and engine.busy):
            engine.progressed_at = now
        engine.reported_at, engine.busy = now, busy
        engine.progress_counter, engine.steps = report.progress_counter, report.steps

    def check(self, now: float, exempt: frozenset[int] = frozenset()) -> list[StalledEngine]:
        """Engines that have stopped, once what they said has been taken in. The `exempt` may be
        without progress."""
        now = self._clock.advance(now)
        for rank, engine in self._progress.items():
            if rank in exempt:
                engine.progressed_at = now
        silent = [
            StalledEngine(rank, f"engine {rank} was silent for {now - engine.reported_at:.1f} s")
            for rank, engine in self._progress.items()
            if now - engine.reported_at > self._limit_s
        ]
        return silent or self._stuck(now)

    def _stuck(self, now: float) -> list[StalledEngine]:
        stuck = {
            rank: engine
            for rank, engine in self._progress.items()
            if engine.busy and now - engine.progressed_at > _STUCK_FACTOR * self._limit_s
        }
        if not stuck:
            return []
        rank, named = min(stuck.items(), key=lambda item: (item[1].steps, item[1].progress_counter))
        idle_s = now - named.progressed_at
        for engine in stuck.values():  # the others waited for it: now they are given their time
            engine.progressed_at = now
        return [StalledEngine(rank, f"engine {rank} had work but no progress for {idle_s:.1f} s")]
