"""Decides when an engine that shares experts continues standalone, from local observations. Pure.

Engines of a broken group wait until the coordinator forms the next group. If the coordinator's host
is lost together with one of their peers, this takes until Ray has detected the loss and the next
coordinator was created and found: a multiple of `stall_timeout_s`. A standalone engine needs no
agreement with others. So an engine steps standalone (`Phase.STANDALONE`) if all of these hold:

- It has received nothing from a coordinator for `stall_timeout_s`. A reachable coordinator decides.
- Its group does not step any more: the group is broken; or one of its steps has made no progress
  for `stall_timeout_s`, for example because a peer vanished without a packet; or it has been
  paused for as long, for a change that is never completed. Otherwise the group simply continues.
- It was in that group. An engine that has left, or was never in a group, lacks requests and state
  to continue with.
- No engine requests a pause.
- It has memory for all experts: workers reserve it for `cluster.min_engines` engines.

The next coordinator that it reaches forms a group with it, at any epoch.
"""

from __future__ import annotations

from swell.configs.schema import ClusterConfig
from swell.coordinator.transport.listening_clock import ListeningClock
from swell.coordinator.wave_protocol.wave_interface import Phase

_OUT_SHARE = 0.25
"""How long an engine must be out of its group before it continues standalone, as a share of the
limit: it may be forming the next group."""


class StandaloneMonitor:
    """Belongs to the loop that receives from the coordinator."""

    def __init__(self, config: ClusterConfig, now: float) -> None:
        self._limit_s = config.stall_timeout_s
        self._has_room = config.min_engines == 1
        self._clock = ListeningClock(self._limit_s)
        self._clock.advance(now)
        self._heard_at = 0.0
        """Time of the last message of a coordinator, by `_clock`."""
        self._changed_at = 0.0
        self._state: tuple[Phase, int, int] | None = None
        """Phase, epoch and progress, unchanged since `_changed_at`."""

    def on_command(self, now: float) -> None:
        """Records a message of the coordinator."""
        self._heard_at = self._clock.read(now)

    def check(
        self, phase: Phase, epoch: int, progress: int, now: float, *, may_serve: bool
    ) -> bool:
        """Whether the engine must stop waiting and step standalone. Call it in each turn of the
        loop, after all received messages were handled. `progress`: steps and layers computed.
        `may_serve`: the engine is in the group of this epoch, and no engine requests a pause."""
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
        """How long the engine may remain in this phase; None: any time."""
        match phase:
            case Phase.OUT | Phase.FORMING:
                return _OUT_SHARE * self._limit_s
            case Phase.RUNNING | Phase.PAUSED:
                return self._limit_s
            case _:
                return None
