"""Which workers have stopped, judged by what they say of themselves.

Pure: time is an argument, in seconds of any monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from swell.coordinator.listening_clock import ListeningClock


@dataclass(slots=True)
class _WorkerState:
    heartbeat_at: float
    progress_counter: int
    first_progress: int
    """Ticks when the present groups were formed: what ranks are compared by."""
    progressed_at: float
    generation: int


class WorkerMonitor:
    """Workers beat in a fixed rhythm and say how many layers they have computed.

    A worker has stopped if

    - it is *silent*: no beat for `stall_timeout_s`; or
    - it is *stuck*: all beat, a step is out, and for twice as long nobody has computed a layer.
      Workers wait for each other, so the one that is furthest behind is named. Twice, because a
      worker also waits for workers of other engines, whose silence is theirs to notice; or
    - it is *caught*: it was told to form groups, and for `stall_timeout_s` it has neither begun to
      nor computed a layer of the step that it is in. Not every operation ends when it is aborted.

    A slow step is neither. Time in which the process that looks was stopped itself, and received
    nothing, does not count (`coordinator/listening_clock.py`).
    """

    def __init__(self, stall_timeout_s: float) -> None:
        self._limit_s = stall_timeout_s
        self._workers: dict[int, _WorkerState] = {}
        self._total_progress = 0
        self._forming: tuple[int, float] | None = None
        self._step_since: float | None = None
        self._clock = ListeningClock(stall_timeout_s)

    @property
    def ranks(self) -> set[int]:
        """Workers that are being watched."""
        return set(self._workers)

    @property
    def progress_counter(self) -> int:
        """Layers computed by all workers that there ever were."""
        return self._total_progress

    def on_heartbeat(
        self, rank: int, progress_counter: int, now: float, generation: int = 0
    ) -> None:
        """A worker lives; from its first beat on it is watched. `generation`: of the groups that
        it is in or forming."""
        now = self._clock.read(now)
        worker = self._workers.setdefault(
            rank, _WorkerState(now, 0, progress_counter, now, generation)
        )
        if progress_counter != worker.progress_counter:
            self._total_progress += progress_counter - worker.progress_counter
            worker.progressed_at = now
        worker.heartbeat_at, worker.progress_counter, worker.generation = (
            now,
            progress_counter,
            generation,
        )

    def forget(self, rank: int) -> None:
        """The worker has been given up."""
        self._workers.pop(rank, None)

    def forming(self, generation: int, now: float) -> None:
        """All workers have been told to form these groups."""
        self._forming = (generation, self._clock.read(now))

    def groups_formed(self) -> None:
        """All groups are formed: a replacement is not behind because it is young."""
        self._forming = None
        for worker in self._workers.values():
            worker.first_progress = worker.progress_counter

    def awaiting_step(self, now: float) -> None:
        """A result is waited for, if none was before."""
        if self._step_since is None:
            self._step_since = self._clock.read(now)

    def step_done(self) -> None:
        """No result is waited for."""
        self._step_since = None

    def check(self, now: float) -> dict[int, str]:
        """The workers that have stopped, and why they are thought to; called once what they said
        has been taken in."""
        now = self._clock.advance(now)
        return self._silent(now) or self._not_left_groups(now) or self._stuck(now)

    def _silent(self, now: float) -> dict[int, str]:
        return {
            rank: f"said nothing for {self._limit_s:g} s"
            for rank, worker in self._workers.items()
            if now - worker.heartbeat_at > self._limit_s
        }

    def _not_left_groups(self, now: float) -> dict[int, str]:
        if self._forming is None:
            return {}
        generation, since = self._forming
        return {
            rank: f"did not leave its groups in {self._limit_s:g} s"
            for rank, worker in self._workers.items()
            if worker.generation < generation
            and now - max(worker.progressed_at, since) > self._limit_s
        }

    def _stuck(self, now: float) -> dict[int, str]:
        if self._step_since is None or not self._workers:
            return {}
        progressed_at = max(worker.progressed_at for worker in self._workers.values())
        if now - max(progressed_at, self._step_since) <= 2 * self._limit_s:
            return {}
        behind = min(self._workers, key=lambda rank: (self._progress_since_formed(rank), rank))
        return {behind: f"is stuck: no layer was computed for {2 * self._limit_s:g} s"}

    def _progress_since_formed(self, rank: int) -> int:
        worker = self._workers[rank]
        return worker.progress_counter - worker.first_progress
