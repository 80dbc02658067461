"""When an engine that shares experts goes on alone: decided from what it sees itself. Pure.

Engines of a broken group wait for the coordinator to form the next one. If the host of the
coordinator is lost, and one of their peers with it, that takes until Ray has found out and the
next coordinator has been made and found: a multiple of `stall_timeout_s`. An engine alone needs
no agreement with others. So it steps alone (`Phase.ALONE`) when

- it has received nothing from a coordinator for `stall_timeout_s`: one that speaks decides;
- its group does not step any more: it is broken, one of its steps has made no progress for
  `stall_timeout_s`, as when a peer vanished without a packet, or it has been paused for as long,
  for a change that is never completed. Else the group goes on as it is;
- it was in that group: one that has left, or was never in any, has nothing to go on with;
- no engine wants a pause;
- it has room for all experts: that is reserved for `cluster.min_engines` engines.

Any coordinator that it hears later forms a group with it, at whatever epoch that one has come to.
"""

from __future__ import annotations

from swell.configs.schema import ClusterConfig
from swell.coordinator.listening_clock import ListeningClock
from swell.coordinator.wave_interface import Phase

_OUT_SHARE = 0.25
"""How long an engine is out of its group before it goes alone, in units of the limit: it may be
forming the next one."""


class StandaloneMonitor:
    """Belongs to the loop that receives from the coordinator."""

    def __init__(self, config: ClusterConfig, now: float) -> None:
        self._limit_s = config.stall_timeout_s
        self._has_room = config.min_engines == 1
        self._clock = ListeningClock(self._limit_s)
        self._clock.advance(now)
        self._heard_at = 0.0
        """The last message of a coordinator, by `_clock`."""
        self._changed_at = 0.0
        self._state: tuple[Phase, int, int] | None = None
        """Phase, epoch and progress; since `_changed_at`."""

    def on_command(self, now: float) -> None:
        """The coordinator has sent a message."""
        self._heard_at = self._clock.read(now)

    def check(
        self, phase: Phase, epoch: int, progress: int, now: float, *, may_serve: bool
    ) -> bool:
        """Whether the engine is to leave what it waits for and step alone. Call it at each turn of
        the loop, after it has taken in what has come. `progress`: steps and layers computed.
        `may_serve`: the engine is in the group of this epoch, and no engine wants a pause."""
        at = self._clock.advance(now)
        if (phase, epoch, progress) != self._state:
            self._state, self._changed_at = (phase, epoch, progress), at
        patience_s = self._patience_s(phase)
        is_due = (
            may_serve
            and self._has_room
            and patience_s is not None
            and at - self._heard_at > self._limit_s
            and at - self._changed_at > patience_s
        )
        if is_due:
            self._changed_at = at
        return is_due

    def _patience_s(self, phase: Phase) -> float | None:
        """How long the engine may stay as it is; None: it needs no help."""
        match phase:
            case Phase.OUT | Phase.FORMING:
                return _OUT_SHARE * self._limit_s
            case Phase.RUNNING | Phase.PAUSED:
                return self._limit_s
            case _:
                return None
