"""How a member finds a coordinator that has moved: a port that says where it is.

A coordinator whose host was lost is started again on another one, with its keys and at another
address. Its peers notice the silence alone: each calls `find` after it has received nothing for
`stall_timeout_s`, and then as often, until it receives something: engines that share experts do not
serve meanwhile, and one that comes late has missed the recovery. A peer that has never received
anything calls sooner: it was perhaps made with the address of a predecessor, and the coordinator
has received nothing from it either, and ends it after `stall_timeout_s`. On the real cluster Ray
knows where the actor is. While Ray's GCS is away no coordinator is found, and nothing is lost by
that: the coordinator cannot move meanwhile, engines go on with what they have, and ingresses route
by their last view and by what they reach.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from swell.configs.log import StructuredLogger
from swell.coordinator.contact import CoordinatorContact
from swell.coordinator.ground import Ground
from swell.coordinator.listening_clock import ListeningClock

FindCoordinator = Callable[[], CoordinatorContact | Awaitable[CoordinatorContact | None] | None]
"""Where the coordinator is now; None: that is unknown. It may block for as long as the GCS is away,
may raise, and is awaitable on a ground whose loops suspend."""


_FIRST_CALL = 0.25
"""When a peer that has received nothing from the coordinator yet calls `find`, in units of the
silence."""


_SILENT = 0.5
"""After which a coordinator counts as silent, in units of the silence after which it is looked for:
its heartbeats come several times as often."""


def find_nothing() -> None:
    """The coordinator cannot move."""


class CoordinatorFinder:
    """Belongs to the loop that receives from the coordinator. `find` runs on a loop of its own."""

    def __init__(self, ground: Ground, find: FindCoordinator, silence_s: float) -> None:
        self._ground = ground
        self._find = find
        self._silence_s = silence_s
        self._patience_s = _FIRST_CALL * silence_s
        self._clock = ListeningClock(silence_s)
        self._next_at = self._patience_s
        """When `find` is called, by `_clock`."""
        self._heard_at = 0.0
        """When the coordinator has sent a message, by `_clock`."""
        self._now = 0.0
        self._is_looking = False
        self._found: CoordinatorContact | None = None
        """What `find` has returned, until `check` has."""
        self._log = StructuredLogger("coordinator.finder")

    def on_message(self) -> None:
        """The coordinator has sent a message."""
        self._patience_s = self._silence_s
        self._heard_at = self._clock.read(self._ground.now())
        self._next_at = self._heard_at + self._patience_s

    @property
    def is_silent(self) -> bool:
        """As of the last `check`, the coordinator has not sent anything for some time."""
        return self._now - self._heard_at > _SILENT * self._silence_s

    def check(self) -> CoordinatorContact | None:
        """Called by each turn of the loop, after it has taken in what has come: where the
        coordinator is, once each time that it was found."""
        self._now = now = self._clock.advance(self._ground.now())
        if now >= self._next_at and not self._is_looking:
            self._next_at = now + self._patience_s
            self._is_looking = True
            self._ground.spawn("coordinator finder", self._look())
        found, self._found = self._found, None
        return found

    async def _look(self) -> None:
        try:
            self._found = await self._ground.run(self._find)
        except Exception as error:
            self._log.warning("coordinator not found", error=f"{type(error).__name__}: {error}")
        finally:
            self._is_looking = False
