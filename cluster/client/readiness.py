"""Whether an engine can make progress, from what views tell. Pure, with time as an argument.

The coordinator takes out of the roster who is silent or stuck, so a view that is fresh says most of
it. What is left to see here is an engine that has work and whose steps and layers do not grow:
it is told before it is replaced. A view that is old says nothing about engines, and harms none:
requests and answers do not pass through the coordinator. Time without views does not count: an
ingress that was stopped, or whose coordinator was, wakes to views of which the first is old.
"""

from __future__ import annotations

import msgspec

from swell.cluster.client.engine_core_client import EngineId
from swell.coordinator.listening_clock import ListeningClock
from swell.coordinator.roster import MemberState
from swell.coordinator.wire import ClusterView, EngineReport

_PAUSED = "paused"
_SERVING = "serving"


class ReadyState(msgspec.Struct, frozen=True):
    """`ranks` can make progress; `reason` says what keeps the others from it."""

    ranks: list[int]
    reason: str
    coordinator_silent: bool


class _EngineProgress:
    """What an engine did last."""

    def __init__(self, now: float) -> None:
        self.done = (0, 0)
        """Steps and layers."""
        self.last_progress_at = now

    def on_report(self, report: EngineReport | None, excused: bool, now: float) -> None:
        if report is None:
            return
        done = (report.steps, report.progress_counter)
        if excused or done != self.done or not report.running + report.waiting:
            self.last_progress_at = now
        self.done = done


class ReadinessTracker:
    """Pulses of the engines of the newest view."""

    def __init__(self, stall_timeout_s: float) -> None:
        self._limit_s = stall_timeout_s
        self._progress: dict[EngineId, _EngineProgress] = {}
        self._active: list[EngineId] = []
        self._repairing: list[int] = []
        self._state = _SERVING
        self._last_view_at: float | None = None
        self._clock = ListeningClock(stall_timeout_s)
        self._listened_s = 0.0

    def follow(self, view: ClusterView, now: float) -> None:
        """A view has come. An engine is excused while it must not compute."""
        reports = {report.rank: report for report in view.reports}
        listened_s = self._listened_s = self._clock.advance(now)
        self._progress = {
            key: self._progress.get(key) or _EngineProgress(listened_s)
            for key in map(EngineId.of, view.roster.members)
        }
        self._active, self._repairing = [], []
        for member in view.roster.members:
            active = member.state is MemberState.ACTIVE
            excused = not active or view.state != _SERVING
            key = EngineId.of(member)
            self._progress[key].on_report(reports.get(member.rank), excused, listened_s)
            if active:
                self._active.append(key)
            elif member.state is MemberState.REPAIRING:
                self._repairing.append(member.rank)
        self._state, self._last_view_at = view.state, now

    def look(self, now: float) -> ReadyState:
        """Who can make progress now. Stillness is counted up to the newest view: afterwards
        nobody told."""
        seen_at = now if self._last_view_at is None else self._last_view_at
        no_progress_s = {
            key.rank: self._listened_s - self._progress[key].last_progress_at
            for key in self._active
        }
        stuck = {rank: time_s for rank, time_s in no_progress_s.items() if time_s > self._limit_s}
        reasons = [f"engine {rank} replaces a worker" for rank in self._repairing]
        reasons += [
            f"engine {rank} has work but made no progress for {time_s:.1f} s"
            for rank, time_s in stuck.items()
        ]
        ranks = [rank for rank in no_progress_s if rank not in stuck]
        if self._state == _PAUSED:
            ranks, reasons = [], ["paused by an operator"]
        return ReadyState(ranks, "; ".join(reasons), now - seen_at > self._limit_s)
