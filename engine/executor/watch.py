"""Which workers have stopped, judged by what they say of themselves.

Pure: time is an argument, in seconds of any monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from swell.coordinator.listening import ListeningClock


@dataclass(slots=True)
class _Seen:
    beat_at: float
    ticks: int
    first_ticks: int
    """Ticks when the present groups were formed: what ranks are compared by."""
    moved_at: float
    generation: int


class Watch:
    """Workers beat in a fixed rhythm and say how many layers they have computed.

    A worker has stopped if

    - it is *silent*: no beat for `stall_timeout_s`; or
    - it is *stuck*: all beat, a step is out, and for twice as long nobody has computed a layer.
      Workers wait for each other, so the one that is furthest behind is named. Twice, because a
      worker also waits for workers of other engines, whose silence is theirs to notice; or
    - it is *caught*: it was told to form groups, and for `stall_timeout_s` it has neither begun to
      nor computed a layer of the step that it is in. Not every operation ends when it is aborted.

    A slow step is neither. Time in which whoever looks had stopped itself, and took in nothing of
    what was said, does not count (`coordinator/listening.py`).
    """

    def __init__(self, stall_timeout_s: float) -> None:
        self._limit_s = stall_timeout_s
        self._seen: dict[int, _Seen] = {}
        self._total_ticks = 0
        self._forming: tuple[int, float] | None = None
        self._out_since: float | None = None
        self._clock = ListeningClock(stall_timeout_s)

    @property
    def ranks(self) -> set[int]:
        """Workers that are being watched."""
        return set(self._seen)

    @property
    def ticks(self) -> int:
        """Layers computed by all workers that there ever were."""
        return self._total_ticks

    def beat(self, rank: int, ticks: int, now: float, generation: int = 0) -> None:
        """A worker lives; from its first beat on it is watched. `generation`: of the groups that
        it is in or forming."""
        now = self._clock.read(now)
        seen = self._seen.setdefault(rank, _Seen(now, 0, ticks, now, generation))
        if ticks != seen.ticks:
            self._total_ticks += ticks - seen.ticks
            seen.moved_at = now
        seen.beat_at, seen.ticks, seen.generation = now, ticks, generation

    def forget(self, rank: int) -> None:
        """The worker has been given up."""
        self._seen.pop(rank, None)

    def forming(self, generation: int, now: float) -> None:
        """All workers have been told to form these groups."""
        self._forming = (generation, self._clock.read(now))

    def grouped(self) -> None:
        """All groups are formed: a replacement is not behind because it is young."""
        self._forming = None
        for seen in self._seen.values():
            seen.first_ticks = seen.ticks

    def step_out(self, now: float) -> None:
        """A result is waited for, if none was before."""
        if self._out_since is None:
            self._out_since = self._clock.read(now)

    def step_done(self) -> None:
        """No result is waited for."""
        self._out_since = None

    def look(self, now: float) -> dict[int, str]:
        """The workers that have stopped, and why they are thought to; called once what they said
        has been taken in."""
        now = self._clock.listened(now)
        return self._silent(now) or self._caught(now) or self._stuck(now)

    def _silent(self, now: float) -> dict[int, str]:
        return {
            rank: f"said nothing for {self._limit_s:g} s"
            for rank, seen in self._seen.items()
            if now - seen.beat_at > self._limit_s
        }

    def _caught(self, now: float) -> dict[int, str]:
        if self._forming is None:
            return {}
        generation, since = self._forming
        return {
            rank: f"did not leave its groups in {self._limit_s:g} s"
            for rank, seen in self._seen.items()
            if seen.generation < generation and now - max(seen.moved_at, since) > self._limit_s
        }

    def _stuck(self, now: float) -> dict[int, str]:
        if self._out_since is None or not self._seen:
            return {}
        moved_at = max(seen.moved_at for seen in self._seen.values())
        if now - max(moved_at, self._out_since) <= 2 * self._limit_s:
            return {}
        behind = min(self._seen, key=lambda rank: (self._advance(rank), rank))
        return {behind: f"is stuck: no layer was computed for {2 * self._limit_s:g} s"}

    def _advance(self, rank: int) -> int:
        seen = self._seen[rank]
        return seen.ticks - seen.first_ticks
