"""Who has stopped: decided by progress, never by whether a process exists. Pure.

Silent: an engine beats from a thread of its own, whatever it computes; no beat for
`stall_timeout_s` means that its process does not run. Stuck: it beats and has work, but no layer
was computed for twice that time. The first is told at once. The second waits longer, because
engines that compute together stop together when one of them falls silent; and of those that are
stuck together only the one that is furthest behind is named: the others wait for it.

Both are measured in time in which the coordinator listened (`coordinator/listening.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from swell.coordinator.listening import ListeningClock
from swell.coordinator.wire import EngineReport

_STUCK_FACTOR = 2.0


@dataclass
class _Pulse:
    """What is known of one engine; times are those of a `ListeningClock`."""

    heard_at: float
    moved_at: float
    ticks: int = 0
    steps: int = 0
    busy: bool = False


@dataclass(frozen=True)
class Verdict:
    """An engine that is to be replaced."""

    rank: int
    reason: str


class Liveness:
    """Pulses of the engines of a roster."""

    def __init__(self, stall_timeout_s: float, now: float) -> None:
        self._limit_s = stall_timeout_s
        self._pulses: dict[int, _Pulse] = {}
        self._clock = ListeningClock(stall_timeout_s)
        self._clock.listened(now)

    def follow(self, ranks: set[int], now: float) -> None:
        """Watch these engines; a newcomer is given the full time to be heard."""
        now = self._clock.read(now)
        self._pulses = {rank: self._pulses.get(rank) or _Pulse(now, now) for rank in ranks}

    def hear(self, report: EngineReport, now: float) -> None:
        pulse = self._pulses.get(report.rank)
        if pulse is None:
            return
        now = self._clock.read(now)
        busy = bool(report.running or report.waiting)
        if report.ticks != pulse.ticks or not (busy and pulse.busy):
            pulse.moved_at = now
        pulse.heard_at, pulse.busy = now, busy
        pulse.ticks, pulse.steps = report.ticks, report.steps

    def look(self, now: float, excused: frozenset[int] = frozenset()) -> list[Verdict]:
        """Engines that have stopped, once what they said has been taken in. The `excused` may be
        without progress."""
        now = self._clock.listened(now)
        for rank, pulse in self._pulses.items():
            if rank in excused:
                pulse.moved_at = now
        silent = [
            Verdict(rank, f"engine {rank} was silent for {now - pulse.heard_at:.1f} s")
            for rank, pulse in self._pulses.items()
            if now - pulse.heard_at > self._limit_s
        ]
        return silent or self._stuck(now)

    def _stuck(self, now: float) -> list[Verdict]:
        stuck = {
            rank: pulse
            for rank, pulse in self._pulses.items()
            if pulse.busy and now - pulse.moved_at > _STUCK_FACTOR * self._limit_s
        }
        if not stuck:
            return []
        rank, named = min(stuck.items(), key=lambda item: (item[1].steps, item[1].ticks))
        idle_s = now - named.moved_at
        for pulse in stuck.values():  # the others waited for it: now they are given their time
            pulse.moved_at = now
        return [Verdict(rank, f"engine {rank} had work but no progress for {idle_s:.1f} s")]
