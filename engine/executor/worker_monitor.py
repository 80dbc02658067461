"""Detects by heartbeats which workers have stopped.

Pure: the time is an argument, in seconds of any monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from swell.coordinator.monitors.progress_monitor import ProgressMonitor


@dataclass(slots=True)
class _WorkerGroups:
    first_progress: int
    """Number of layers computed when the current groups were formed: ranks are compared from
    there."""
    generation: int
    """The generation of the groups that it is in or forms."""


class WorkerMonitor:
    """Monitors workers, which periodically send heartbeats with the number of layers that they have
    computed.

    A worker has stopped if

    - it is *silent*: no heartbeat for `stall_timeout_s`; or
    - it is *stuck*: all workers send heartbeats, a step is in flight, and for twice
      `stall_timeout_s` none has computed a layer. Workers wait for each other, so the one with
      the least progress is reported. The time is doubled because a worker also waits for
      workers of other engines, whose silence their own engine must detect; or
    - it is *caught*: it was commanded to form groups, and for `stall_timeout_s` it has neither
      started to do so nor computed a layer of its current step. Not every operation returns when
      it is aborted.

    A worker in a slow step has not stopped.
    """

    def __init__(self, stall_timeout_s: float) -> None:
        self._limit_s = stall_timeout_s
        self._monitor: ProgressMonitor[int] = ProgressMonitor(stall_timeout_s)
        self._groups: dict[int, _WorkerGroups] = {}
        self._total_progress = 0
        self._forming: tuple[int, float] | None = None
        self._step_since: float | None = None

    @property
    def ranks(self) -> set[int]:
        """Workers that are monitored."""
        return set(self._groups)

    @property
    def progress_counter(self) -> int:
        """Number of layers computed by all current and former workers."""
        return self._total_progress

    def on_heartbeat(
        self, rank: int, progress_counter: int, now: float, generation: int = 0
    ) -> None:
        """Records a heartbeat of a worker, which is monitored from its first one on."""
        if rank not in self._groups:
            self._groups[rank] = _WorkerGroups(progress_counter, generation)
            self._monitor.set_subjects(self._groups, now)
        self._total_progress += progress_counter - (self._monitor.counter(rank) or 0)
        self._monitor.on_report(rank, progress_counter, now)
        self._groups[rank].generation = generation

    def forget(self, rank: int) -> None:
        """Forgets a worker that is about to be replaced."""
        self._groups.pop(rank, None)
        self._monitor.remove(rank)

    def forming(self, generation: int, now: float) -> None:
        """Records that all workers were commanded to form these groups."""
        self._forming = (generation, self._monitor.read(now))

    def groups_formed(self) -> None:
        """Records that all groups are formed: from now on, progress of old and new workers is
        comparable."""
        self._forming = None
        for rank, groups in self._groups.items():
            groups.first_progress = self._monitor.counter(rank)

    def awaiting_step(self, now: float) -> None:
        """Records that a result is awaited, if none was before."""
        if self._step_since is None:
            self._step_since = self._monitor.read(now)

    def step_done(self) -> None:
        """Records that no result is awaited."""
        self._step_since = None

    def check(self, now: float) -> dict[int, str]:
        """Returns the workers that have stopped, and why; call it after all received heartbeats
        were handled."""
        self._monitor.advance(now)
        return self._silent() or self._not_left_groups() or self._stuck()

    def describe(self) -> str:
        """Returns how far the workers have come, for people."""
        parts = (
            f"worker {rank} {self._progress_since_formed(rank)}" for rank in sorted(self._groups)
        )
        return f"layers or operations since the groups were formed: {', '.join(parts)}"

    def _silent(self) -> dict[int, str]:
        silent = self._monitor.silent_s(self._limit_s)
        return dict.fromkeys(silent, f"sent no heartbeat for {self._limit_s:g} s")

    def _not_left_groups(self) -> dict[int, str]:
        if self._forming is None:
            return {}
        generation, since = self._forming
        return {
            rank: f"did not leave its groups in {self._limit_s:g} s"
            for rank in self._monitor.without_progress_s(self._limit_s, since)
            if self._groups[rank].generation < generation
        }

    def _stuck(self) -> dict[int, str]:
        if self._step_since is None or not self._groups:
            return {}
        limit_s = 2 * self._limit_s
        if len(self._monitor.without_progress_s(limit_s, self._step_since)) < len(self._groups):
            return {}
        behind = min(self._groups, key=lambda rank: (self._progress_since_formed(rank), rank))
        return {behind: f"is stuck: it computed no layer for {limit_s:g} s"}

    def _progress_since_formed(self, rank: int) -> int:
        progress: int = self._monitor.counter(rank) - self._groups[rank].first_progress
        return progress
