"""The manager's view of the engines of a cluster at one moment. Pure."""

from __future__ import annotations

import enum

import msgspec


class Place(enum.Enum):
    """Stage of an engine's life, from start to stop."""

    STARTING = "starting"
    """The engine loads, or waits to join."""
    SERVING = "serving"
    """The engine has joined. It is in the roster unless the coordinator has just removed it."""
    ENDING = "ending"
    """The engine is out of the roster. Its rank is taken until its resources are free again."""


class Intent(enum.Enum):
    """The manager's decision about an engine."""

    STAY = "stay"
    MOVE = "move"
    """The host will go away: the engine serves on, without counting towards the target, until its
    replacement serves or its time is almost over."""
    LEAVE = "leave"
    """The cluster has more engines than its target: this one may be kept if the target grows
    again."""
    DRAIN = "drain"
    """An operator, an upgrade or the loss of its host has selected this engine: it is not kept."""
    RELOAD = "reload"
    """The engine leaves, gets the weights of another version and joins again. It always counts
    towards the target."""


class EngineStatus(msgspec.Struct, frozen=True):
    rank: int
    place: Place
    intent: Intent = Intent.STAY
    in_transition: bool = False
    """The membership of the engine is changing: it is neither kept nor cancelled."""
    waits_for_room: bool = False
    """The engine starts once the Ray cluster has room for it."""
    node: str | None = None
    """The Ray node on which the engine serves; None: it is starting."""
    version: str = ""
    next_version: str = ""
    """The version that the engine reloads for."""
    is_extra: bool = False
    """The engine starts in addition to the target number, and counts once it serves."""
    for_answers: bool = False
    """The engine is started because unfinished responses need its version."""
    previous: str = ""
    """While the engine starts: the version whose weights its own ones replace."""
    is_vacating: bool = False
    """The engine is leaving and counts until it has stopped: another one takes its place."""

    @property
    def versions(self) -> list[str]:
        """The versions that the engine runs, will run, or has run and may run again."""
        return [name for name in (self.version, self.next_version, self.previous) if name]

    @property
    def is_present(self) -> bool:
        stays = self.intent in (Intent.STAY, Intent.RELOAD)
        return self.is_vacating or (stays and not self.is_extra)


class FleetView(msgspec.Struct, frozen=True):
    """All engines that must be terminated at some time, by rank."""

    engines: tuple[EngineStatus, ...] = ()
    is_committing: bool = False
    """The group of engines is changing."""
    is_reserved: bool = False
    """All free room is reserved for an engine that waits: no other one starts."""

    @property
    def serving(self) -> list[int]:
        """Ranks of engines that serve, including leaving ones."""
        return [engine.rank for engine in self.engines if engine.place is Place.SERVING]

    @property
    def staying(self) -> list[int]:
        """Ranks of engines that serve and do not leave."""
        return self._ranks(Place.SERVING)

    @property
    def starting(self) -> list[int]:
        """Ranks of starting engines that count towards the target."""
        return self._ranks(Place.STARTING)

    @property
    def pending(self) -> list[int]:
        """Ranks of starting engines that wait for room."""
        return [e.rank for e in self.engines if e.waits_for_room and e.intent is Intent.STAY]

    @property
    def any_leaving(self) -> bool:
        return any(engine.intent is not Intent.STAY for engine in self.engines)

    @property
    def num_present(self) -> int:
        """The number of engines that count towards the target. A dead engine counts until its rank
        is free for its replacement."""
        return sum(engine.is_present for engine in self.engines)

    def of(self, place: Place) -> list[EngineStatus]:
        """Engines of a stage that are not leaving."""
        return [e for e in self.engines if e.place is place and e.intent is Intent.STAY]

    @property
    def can_be_kept(self) -> list[int]:
        """Ranks of leaving engines that may still be kept."""
        return self._ranks(Place.SERVING, Intent.LEAVE, may_be_moving=False)

    @property
    def can_be_cancelled(self) -> list[int]:
        """Ranks of starting engines that are not joining yet."""
        return self._ranks(Place.STARTING, may_be_moving=False)

    def free_ranks(self, count: int) -> list[int]:
        """The `count` lowest ranks that no engine has."""
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
