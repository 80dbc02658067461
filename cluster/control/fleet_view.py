"""The engines of a cluster as its manager counts them, at one moment. Pure."""

from __future__ import annotations

import enum

import msgspec


class Place(enum.Enum):
    """Where an engine is between its start and its end."""

    STARTING = "starting"
    """It loads, or waits to join."""
    SERVING = "serving"
    """It has joined, and is in the roster unless the coordinator has just removed it."""
    ENDING = "ending"
    """It is out of the roster; its rank is taken until its resources are free again."""


class Intent(enum.Enum):
    """What the manager has decided about an engine."""

    STAY = "stay"
    MOVE = "move"
    """Its host goes away: it serves on, and does not count, until its replacement serves or its
    time is nearly over."""
    LEAVE = "leave"
    """There are more than the target: it may be kept, if the target grows again."""
    DRAIN = "drain"
    """An operator has named it: it is not kept."""
    RELOAD = "reload"
    """It leaves, gets the weights of another version, and joins again: it counts all the while."""


class EngineStatus(msgspec.Struct, frozen=True):
    rank: int
    place: Place
    intent: Intent = Intent.STAY
    in_transition: bool = False
    """A change of its place in the roster is under way: it is neither kept nor cancelled."""
    waits_for_room: bool = False
    """It starts when the Ray cluster has room for it."""
    node: str | None = None
    """Where it serves; None: it starts."""
    version: str = ""
    next_version: str = ""
    """The one that it reloads for."""
    is_extra: bool = False
    """It starts beside those that are wanted, and counts when it serves."""
    for_answers: bool = False
    """It starts since answers that have begun need its version."""
    previous: str = ""
    """The version whose weights it replaces by those of its own, while it starts."""
    is_vacating: bool = False
    """It leaves, and counts until it has gone: another one takes its place."""

    @property
    def versions(self) -> list[str]:
        """What it runs, will run, or has run and may run again."""
        return [name for name in (self.version, self.next_version, self.previous) if name]

    @property
    def is_present(self) -> bool:
        stays = self.intent in (Intent.STAY, Intent.RELOAD)
        return self.is_vacating or (stays and not self.is_extra)


class FleetView(msgspec.Struct, frozen=True):
    """Every engine that has to be ended some day, by rank."""

    engines: tuple[EngineStatus, ...] = ()
    is_committing: bool = False
    """The group of the engines changes."""
    is_reserved: bool = False
    """Whatever room there is belongs to an engine that waits: no other one starts."""

    @property
    def serving(self) -> list[int]:
        """Ranks of engines that serve, and of those that leave."""
        return [engine.rank for engine in self.engines if engine.place is Place.SERVING]

    @property
    def staying(self) -> list[int]:
        """Ranks of engines that serve and do not leave."""
        return self._ranks(Place.SERVING)

    @property
    def starting(self) -> list[int]:
        """Ranks of engines that start and are wanted."""
        return self._ranks(Place.STARTING)

    @property
    def pending(self) -> list[int]:
        """Those of them that wait for room."""
        return [e.rank for e in self.engines if e.waits_for_room and e.intent is Intent.STAY]

    @property
    def any_leaving(self) -> bool:
        return any(engine.intent is not Intent.STAY for engine in self.engines)

    @property
    def num_present(self) -> int:
        """Engines that count towards the target. One that has died counts until its rank is free
        for its replacement."""
        return sum(engine.is_present for engine in self.engines)

    def of(self, place: Place) -> list[EngineStatus]:
        """Engines in that place that do not leave."""
        return [e for e in self.engines if e.place is place and e.intent is Intent.STAY]

    @property
    def can_be_kept(self) -> list[int]:
        """Ranks of engines that leave, and need not."""
        return self._ranks(Place.SERVING, Intent.LEAVE, may_be_moving=False)

    @property
    def can_be_cancelled(self) -> list[int]:
        """Ranks of engines that start, and do not join yet."""
        return self._ranks(Place.STARTING, may_be_moving=False)

    def free_ranks(self, count: int) -> list[int]:
        """The lowest ones."""
        taken = {engine.rank for engine in self.engines}
        return [rank for rank in range(count + len(taken)) if rank not in taken][:count]

    def _ranks(
        self, place: Place, intent: Intent = Intent.STAY, *, may_be_moving: bool = True
    ) -> list[int]:
        return [
            e.rank
            for e in self.engines
            if e.place is place
            and e.intent is intent
            and not e.is_extra
            and (may_be_moving or not e.in_transition)
        ]
