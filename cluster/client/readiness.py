"""Whether an engine can make progress, from what views tell. Pure, with time as an argument.

The coordinator takes out of the roster who is silent or stuck, so a view that is fresh says most of
it. What is left to see here is an engine that has work and whose steps and layers do not grow:
it is told before it is replaced. A view that is old says nothing about engines, and harms none:
requests and answers do not pass through the coordinator. Time without views does not count: an
ingress that was stopped, or whose coordinator was, wakes to views of which the first is old.
"""

from __future__ import annotations

import msgspec

from swell.cluster.client.links import EngineId
from swell.coordinator.listening import ListeningClock
from swell.coordinator.roster import MemberState
from swell.coordinator.wire import ClusterView, EngineReport

_PAUSED = "paused"
_SERVING = "serving"


class ReadyState(msgspec.Struct, frozen=True):
    """`ranks` can make progress; `reason` says what keeps the others from it."""

    ranks: list[int]
    reason: str
    coordinator_silent: bool


class _Pulse:
    """What an engine did last."""

    def __init__(self, now: float) -> None:
        self.done = (0, 0)
        """Steps and layers."""
        self.moved_at = now

    def hear(self, report: EngineReport | None, excused: bool, now: float) -> None:
        if report is None:
            return
        done = (report.steps, report.ticks)
        if excused or done != self.done or not report.running + report.waiting:
            self.moved_at = now
        self.done = done


class Readiness:
    """Pulses of the engines of the newest view."""

    def __init__(self, stall_timeout_s: float) -> None:
        self._limit_s = stall_timeout_s
        self._pulses: dict[EngineId, _Pulse] = {}
        self._active: list[EngineId] = []
        self._repairing: list[int] = []
        self._state = _SERVING
        self._seen_at: float | None = None
        self._clock = ListeningClock(stall_timeout_s)
        self._listened_s = 0.0

    def follow(self, view: ClusterView, now: float) -> None:
        """A view has come. An engine is excused while it must not compute."""
        reports = {report.rank: report for report in view.reports}
        listened_s = self._listened_s = self._clock.listened(now)
        self._pulses = {
            key: self._pulses.get(key) or _Pulse(listened_s)
            for key in map(EngineId.of, view.roster.members)
        }
        self._active, self._repairing = [], []
        for member in view.roster.members:
            active = member.state is MemberState.ACTIVE
            excused = not active or view.state != _SERVING
            key = EngineId.of(member)
            self._pulses[key].hear(reports.get(member.rank), excused, listened_s)
            if active:
                self._active.append(key)
            elif member.state is MemberState.REPAIRING:
                self._repairing.append(member.rank)
        self._state, self._seen_at = view.state, now

    def look(self, now: float) -> ReadyState:
        """Who can make progress now. Stillness is counted up to the newest view: afterwards
        nobody told."""
        seen_at = now if self._seen_at is None else self._seen_at
        still_s = {key.rank: self._listened_s - self._pulses[key].moved_at for key in self._active}
        stuck = {rank: time_s for rank, time_s in still_s.items() if time_s > self._limit_s}
        reasons = [f"engine {rank} replaces a worker" for rank in self._repairing]
        reasons += [
            f"engine {rank} has work but made no progress for {time_s:.1f} s"
            for rank, time_s in stuck.items()
        ]
        ranks = [rank for rank in still_s if rank not in stuck]
        if self._state == _PAUSED:
            ranks, reasons = [], ["paused by an operator"]
        return ReadyState(ranks, "; ".join(reasons), now - seen_at > self._limit_s)
