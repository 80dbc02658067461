"""Finds a coordinator that has moved to another host.

A coordinator whose host was lost is restarted on another host, with its keys and at another
address. Its peers only notice that it is silent. Each peer calls `find` after it has received
nothing for `stall_timeout_s`, and repeats the call at this interval until it receives something:
meanwhile engines that share experts do not serve, and an engine that is late misses the recovery. A
peer that has never received anything calls `find` sooner: perhaps it was created with a
predecessor's address. The coordinator has received nothing from it either, and removes it after
`stall_timeout_s`.

On a real cluster Ray knows where the actor is. While Ray's GCS is unavailable, no coordinator is
found. Nothing is lost: the coordinator cannot move meanwhile, engines continue to serve, and
ingresses route by their last view and by which engines they reach.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from swell.configs.runtime.log import StructuredLogger
from swell.coordinator.transport.coordinator_contact import CoordinatorContact
from swell.coordinator.transport.listening_clock import ListeningClock
from swell.coordinator.transport.runtime import Runtime

FindCoordinator = Callable[[], CoordinatorContact | Awaitable[CoordinatorContact | None] | None]
"""Returns where the coordinator is now, or None if that is unknown. It may block while the GCS is
unavailable, may raise, and is awaitable on a runtime whose loops suspend."""


_FIRST_CALL = 0.25
"""When a peer that has received nothing from the coordinator yet calls `find`, as a share of the
silence limit."""


_SILENT = 0.5
"""When a coordinator counts as silent, as a share of the silence after which `find` is called: its
heartbeats are several times as frequent."""


def find_nothing() -> None:
    """`find` for a coordinator that cannot move."""


class CoordinatorFinder:
    """Belongs to the loop that receives from the coordinator. `find` runs on a separate loop."""

    def __init__(self, runtime: Runtime, find: FindCoordinator, silence_s: float) -> None:
        self._runtime = runtime
        self._find = find
        self._silence_s = silence_s
        self._patience_s = _FIRST_CALL * silence_s
        self._clock = ListeningClock(silence_s)
        self._next_at = self._patience_s
        """Time of the next call of `find`, by `_clock`."""
        self._heard_at = 0.0
        """Time of the coordinator's last message, by `_clock`."""
        self._now = 0.0
        self._is_looking = False
        self._found: CoordinatorContact | None = None
        """Result of `find` that `check` has not returned yet."""
        self._log = StructuredLogger("coordinator.finder")

    def on_message(self) -> None:
        """Records a message of the coordinator."""
        self._patience_s = self._silence_s
        self._heard_at = self._clock.read(self._runtime.now())
        self._next_at = self._heard_at + self._patience_s

    @property
    def is_silent(self) -> bool:
        """Whether, at the last `check`, the coordinator had been silent for some time."""
        return self._now - self._heard_at > _SILENT * self._silence_s

    def check(self) -> CoordinatorContact | None:
        """Checks for silence. The loop calls it in each turn, after it has handled all received
        messages. Returns the coordinator's contact once after each successful `find`."""
        self._now = now = self._clock.advance(self._runtime.now())
        if now >= self._next_at and not self._is_looking:
            self._next_at = now + self._patience_s
            self._is_looking = True
            self._runtime.spawn("coordinator finder", self._look())
        found, self._found = self._found, None
        return found

    async def _look(self) -> None:
        try:
            self._found = await self._runtime.run(self._find)
        except Exception as error:
            self._log.warning("coordinator not found", error=f"{type(error).__name__}: {error}")
        finally:
            self._is_looking = False
