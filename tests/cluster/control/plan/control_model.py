"""A model of a manager and its engines, for all orders of requests, starts, deaths and takeovers.

The decisions are those of `control_state.py`. The model carries them out as `Fleet` does, one event
at a time. Time passes only if a plan waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import ModuleType
from typing import Any

from msgspec.structs import replace as with_fields

from swell.cluster.control.plan import control_state
from swell.cluster.control.plan.checkpoint import ClusterCheckpoint
from swell.cluster.control.plan.fleet_view import EngineStatus, FleetView, Intent, Place
from swell.configs.schema import Config, load
from swell.coordinator.manager_state import DesiredState

_REST_MOVES = 60


class Violation(AssertionError):
    """An invariant does not hold. The message ends with the events that led there."""


@dataclass(frozen=True)
class Bounds:
    """How often each kind of event may happen."""

    data: int = 1
    max_engines: int = 3
    scales: int = 0
    drains: int = 0
    pauses: int = 0
    deaths: int = 0
    failures: int = 0
    """Starts that fail, or groups that do not form."""
    take_overs: int = 0
    loads: int = 0
    """Targets that the autoscaler requests."""
    waits: int = 0
    """Starts that find no room and wait for it."""
    notices: int = 0
    """Engines whose host will be taken away."""


@dataclass(frozen=True)
class Batch:
    """Engines that were started together."""

    ranks: tuple[int, ...]
    is_requested: bool
    is_joining: bool = False


@dataclass(frozen=True)
class World:
    state: Any
    engines: tuple[EngineStatus, ...]
    batches: tuple[Batch, ...]
    left: Bounds
    accepted: int
    """The newest accepted target."""
    whole: int
    """The smallest target that was accepted since the manager last saw the cluster whole."""
    paused: bool
    checkpoint: ClusterCheckpoint
    is_planned: bool = False
    """Whether nothing has happened since the last plan."""
    wait_s: float | None = None
    now: float = 0.0

    @cached_property
    def fleet(self) -> FleetView:
        in_transition = any(engine.in_transition for engine in self.engines)
        return FleetView(self.engines, in_transition)

    @cached_property
    def key(self) -> object:
        """A key that is equal for worlds that differ only in the current time."""
        slots = sorted(self.state.backoff.slots.items())
        return (
            self.state.change, self.state.leadership, self.state.pause_requested,
            self.state.has_served,
            tuple((r, s.failures, s.deaths, max(0.0, s.not_before - self.now)) for r, s in slots),
            self.engines, self.batches, self.left, self.accepted, self.whole, self.paused,
            self.checkpoint, self.is_planned,
        )  # fmt: skip


Move = tuple[str, World]


@dataclass
class Model:
    """The moves of a world. `control` is the module `control_state` or a mutated copy of it."""

    bounds: Bounds
    control: ModuleType = control_state
    config: Config = field(init=False)
    rested: set[object] = field(default_factory=set)
    """Keys of worlds that are known to settle."""

    def __post_init__(self) -> None:
        cluster = {"max_engines": self.bounds.max_engines, "drain_timeout_s": 30}
        self.config = load(
            {"model": {"path": "m"}, "parallel": {"data": self.bounds.data}, "cluster": cluster}
        )

    def first(self) -> World:
        data = self.bounds.data
        nothing = ClusterCheckpoint()
        state = self._take_over(nothing, paused=False)
        return World(state, (), (), self.bounds, data, data, False, self._checkpoint(state))

    def _take_over(self, checkpoint: ClusterCheckpoint, paused: bool) -> Any:
        state = self.control.initial(self.config)
        limits = self.config.cluster
        return self.control.take_over(state, checkpoint, is_paused=paused, limits=limits)

    @staticmethod
    def _checkpoint(state: Any) -> ClusterCheckpoint:
        change, paused, served = state.change, state.pause_requested, state.has_served
        desired = DesiredState("owner", change.target, paused, served, data=1)
        return ClusterCheckpoint(desired, "id")

    # ------------------------------------------------------------------ required moves

    def owed(self, world: World) -> Iterator[Move]:
        """Yields the moves that must happen by themselves."""
        if not world.is_planned:
            yield self.plan(world)
        elif world.wait_s is not None:
            later = replace(world, now=world.now + world.wait_s, is_planned=False, wait_s=None)
            yield "time passes", later
        if self._checkpoint(world.state) != world.checkpoint:
            yield "checkpoint", replace(world, checkpoint=self._checkpoint(world.state))
        can_move = not world.fleet.is_committing
        for number, batch in enumerate(world.batches):
            alive = self._alive(world, batch)
            if not alive and self._waiting(world, batch):
                continue
            if batch.is_joining or not alive:
                yield self._finish(world, number, ())
            elif can_move:
                yield self._join(world, number)
        for engine in world.engines:
            leaves = engine.intent in (Intent.LEAVE, Intent.DRAIN)
            is_cancelled = engine.place is Place.STARTING and leaves
            if engine.place is Place.ENDING or is_cancelled:
                yield f"end {engine.rank}", _without(world, engine.rank)
            elif leaves and engine.in_transition:
                ending = with_fields(engine, place=Place.ENDING, in_transition=False)
                yield f"detached {engine.rank}", _with(world, ending)
            elif engine.intent is Intent.MOVE:
                if len(world.fleet.staying) >= world.state.change.target:
                    yield self._leave_host(world, engine)
            elif leaves and can_move:
                yield f"detach {engine.rank}", _with(world, with_fields(engine, in_transition=True))

    @staticmethod
    def _leave_host(world: World, engine: EngineStatus) -> Move:
        """Starts the drain of an engine, because its replacement serves or its host is about to
        go."""
        return f"leave host {engine.rank}", _with(world, with_fields(engine, intent=Intent.DRAIN))

    def plan(self, world: World) -> Move:
        fleet, change = world.fleet, world.state.change
        whole = world.whole
        if _is_whole(fleet, change.target):
            whole = change.target
        state, plan = self.control.plan(world.state, fleet, world.now)
        changes = dict.fromkeys(plan.keep, Intent.STAY)
        changes |= dict.fromkeys((*plan.cancel, *plan.leave), Intent.LEAVE)
        engines = [
            with_fields(engine, intent=changes.get(engine.rank, engine.intent))
            for engine in world.engines
        ]
        engines += [EngineStatus(rank, Place.STARTING) for rank in plan.start]
        batches = world.batches
        if plan.start:
            batches += (Batch(plan.start, plan.is_requested),)
        after = replace(
            world,
            state=state,
            engines=_ordered(engines),
            batches=batches,
            whole=whole,
            is_planned=True,
            wait_s=plan.wait_s,
        )
        _check_plan(world, plan, after)
        return "plan", after

    def _join(self, world: World, number: int) -> Move:
        alive = self._alive(world, world.batches[number])
        for engine in alive:
            world = _with(world, with_fields(engine, in_transition=True))
        batch = replace(world.batches[number], is_joining=True)
        return f"join {batch.ranks}", _put_batch(world, number, batch)

    def _finish(self, world: World, number: int, failing: tuple[int, ...]) -> Move:
        """Finishes a batch. Engines in `failing` are removed, the others serve."""
        batch, started = world.batches[number], []
        for engine in self._alive(world, batch):
            if engine.rank not in failing:
                started.append(engine.rank)
                serving = with_fields(engine, place=Place.SERVING, in_transition=False)
                world = _with(world, serving)
        waiting = self._waiting(world, batch)
        rest = Batch(waiting, batch.is_requested) if waiting else None
        world = _put_batch(world, number, rest)
        for rank in failing:
            world = self._fail(world, batch, rank)
        world = replace(world, state=self.control.on_joined(world.state, started))
        return f"started {started}, failed {list(failing)}", world

    def _fail(self, world: World, batch: Batch, rank: int) -> World:
        """Lets the start of one engine fail. The others of its batch continue."""
        world = _without(world, rank)
        state = self.control.on_failed(
            world.state,
            world.fleet,
            self.control.StartFailure(rank, "no room"),
            world.now,
            is_requested=batch.is_requested,
        )
        after = replace(world, state=state)
        _check_failure(world, batch, after)
        return after

    @staticmethod
    def _alive(world: World, batch: Batch) -> list[EngineStatus]:
        return [
            engine
            for engine in world.engines
            if engine.rank in batch.ranks
            and engine.place is Place.STARTING
            and engine.intent is Intent.STAY
            and not engine.waits_for_room
        ]

    @staticmethod
    def _waiting(world: World, batch: Batch) -> tuple[int, ...]:
        return tuple(rank for rank in batch.ranks if rank in world.fleet.pending)

    # ----------------------------------------------------------------- optional moves

    def free(self, world: World) -> Iterator[Move]:
        """Yields the moves that may happen: requests and failures."""
        left, limits = world.left, self.config.cluster
        if left.scales:
            for engines in range(1, left.max_engines + 1):
                state = self.control.scale(world.state, world.fleet, engines, limits)
                yield f"scale {engines}", self._accept(world, state, engines, "scales")
        if left.loads:
            for engines in range(1, left.max_engines + 1):
                state = self.control.follow_load(world.state, engines, limits)
                after = self._accept(world, state, engines, "loads")
                yield f"load wants {engines}", replace(after, whole=engines)
        yield from self._of_hosts(world)
        if left.drains:
            for engine in world.engines:
                stays = engine.intent is Intent.STAY
                can_fall = world.state.change.target > 1 or not stays
                if can_fall and engine.place is Place.SERVING and engine.intent is not Intent.MOVE:
                    state = self.control.drain(world.state, world.fleet, engine.rank, limits)
                    marked = _with(world, with_fields(engine, intent=Intent.DRAIN))
                    target = world.accepted if not stays else world.state.change.target - 1
                    after = self._accept(marked, state, target, "drains")
                    yield (
                        f"drain {engine.rank}",
                        after if stays else replace(after, whole=world.whole),
                    )
        if left.pauses:
            state = self.control.set_pause(world.state, not world.paused)
            after = replace(world, state=state, paused=not world.paused)
            after = replace(after, checkpoint=self._checkpoint(state))
            yield "pause or resume", _spend(after, "pauses")
        if left.deaths:
            for engine in world.engines:
                if engine.place is Place.SERVING:
                    yield self._die(world, engine)
        if left.failures:
            for number, batch in enumerate(world.batches):
                ranks = tuple(engine.rank for engine in self._alive(world, batch))
                if batch.is_joining:
                    for failing in {ranks[:1], ranks} - {()}:
                        name, after = self._finish(world, number, failing)
                        yield name, _spend(after, "failures")
                    continue
                for rank in ranks:
                    after = self._fail(world, batch, rank)
                    yield f"failed {rank}", _spend(after, "failures")
        if left.take_overs:
            yield "take-over", self._succeed(world)

    def _of_hosts(self, world: World) -> Iterator[Move]:
        for engine in world.engines:
            stays, rank = engine.intent is Intent.STAY, engine.rank
            starts = engine.place is Place.STARTING and stays and not engine.in_transition
            if starts and (engine.waits_for_room or world.left.waits):
                changed = with_fields(engine, waits_for_room=not engine.waits_for_room)
                after = _with(world, changed)
                is_new = changed.waits_for_room
                yield f"room for {rank}: {not is_new}", _spend(after, "waits") if is_new else after
            if engine.place is Place.SERVING and stays and world.left.notices:
                moving = _with(world, with_fields(engine, intent=Intent.MOVE))
                yield f"notice {rank}", _spend(moving, "notices")
            if engine.place is Place.SERVING and engine.intent is Intent.MOVE:
                yield self._leave_host(world, engine)

    def _accept(self, world: World, state: Any, target: int, kind: str) -> World:
        whole = world.whole
        if _is_whole(world.fleet, world.state.change.target) or world.state.change.error:
            whole = world.state.change.target
        if kind == "drains":  # whole before the engine was marked
            whole = min(whole, target)
        after = replace(
            world,
            state=state,
            accepted=target,
            whole=min(whole, target),
            checkpoint=self._checkpoint(state),
            is_planned=False,
        )
        return _spend(after, kind)

    def _die(self, world: World, engine: EngineStatus) -> Move:
        dead = with_fields(engine, place=Place.ENDING, in_transition=False)
        after = _with(world, dead)
        if engine.intent is Intent.STAY:
            state = self.control.on_death(after.state, engine.rank, 1.0, world.now, "killed")
            after = replace(after, state=state)
        return f"die {engine.rank}", _spend(after, "deaths")

    def _succeed(self, world: World) -> World:
        """Starts another manager. It adopts the engines that serve or start and stops all
        others."""
        state = self._take_over(world.checkpoint, world.paused)
        engines = tuple(
            with_fields(
                engine,
                in_transition=False,
                intent=Intent.STAY if engine.intent in (Intent.STAY, Intent.MOVE) else Intent.LEAVE,
            )
            for engine in world.engines
            if engine.place is Place.SERVING
            or (
                engine.place is Place.STARTING
                and engine.intent is Intent.STAY
                and not engine.waits_for_room
            )
        )
        starting = tuple(e.rank for e in engines if e.place is Place.STARTING)
        batches = (Batch(starting, False),) if starting else ()
        target = state.change.target
        after = replace(
            world,
            state=state,
            engines=engines,
            batches=batches,
            accepted=target if world.state.change.error else world.accepted,
            whole=target,
            is_planned=False,
            wait_s=None,
        )
        return _spend(after, "take_overs")

    # ---------------------------------------------------------- invariants

    def check(self, world: World) -> None:
        """Checks the invariants that hold in every world."""
        change, fleet = world.state.change, world.fleet
        stage = self.control.ChangeStage
        _law((change.error is not None) == (change.stage is stage.FAILED), "error iff failed")
        if change.stage is not stage.FAILED:
            _law(change.target == world.accepted, "the newest target counts")
        _law(world.state.pause_requested == world.paused, "a pause lasts until it is ended")
        _law(1 <= change.target <= self.bounds.max_engines, "the target is within its limits")
        phase = self.control.phase(world.state, fleet, world.now)
        if phase == "idle":
            _law(_is_whole(fleet, change.target), "idle means whole")
        if phase == "pending":
            _law(fleet.starting == fleet.pending != [], "pending means that nothing else is done")

    def rest(self, world: World) -> None:
        """Checks that, without further failures, the target number of engines serves in the end.
        Each world is followed only once, because most are on the path of others."""
        passed = []
        for _ in range(_REST_MOVES):
            if (world.key, world.wait_s) in self.rested:
                break
            passed.append((world.key, world.wait_s))
            move = next(self.owed(world), None)
            if move is None:
                self._check_rest(world)
                break
            world = move[1]
            self.check(world)
        else:
            raise Violation("it never comes to rest")
        self.rested.update(passed)

    def _check_rest(self, world: World) -> None:
        change = world.state.change
        pending = world.fleet.pending
        is_whole = not pending and _is_whole(world.fleet, change.target)
        serve_or_wait = len(world.fleet.staying) + len(pending) == change.target
        _law(is_whole or (bool(pending) and serve_or_wait), "as many serve as are wanted")
        moving = sum(e.intent is Intent.MOVE for e in world.engines) if pending else 0
        _law(len(world.engines) - moving == change.target, "nothing is left over")
        _law(world.checkpoint == self._checkpoint(world.state), "what is wanted is written down")


def _check_plan(before: World, plan: Any, after: World) -> None:
    fleet, target = before.fleet, before.state.change.target
    by_rank = {engine.rank: engine for engine in before.engines}
    for rank in plan.keep:
        engine = by_rank[rank]
        _law(engine.intent is Intent.LEAVE and not engine.in_transition, "kept wrongly")
    for rank in plan.cancel:
        _law(rank in fleet.starting and not by_rank[rank].in_transition, "cancelled wrongly")
    _law(set(plan.leave) <= set(fleet.staying), "only engines that serve leave")
    _law(not plan.leave or not after.fleet.starting, "starts are cancelled before engines leave")
    for rank in plan.start:
        _law(rank not in by_rank, "a rank is free before it is started")
        _law(not before.state.backoff.wait_s(rank, before.now), "nothing starts before its time")
    _law(not plan.start or not (plan.cancel or plan.leave), "nothing both grows and shrinks")
    present = after.fleet.num_present
    _law(present <= max(target, fleet.num_present), "no more than are wanted are started")
    _law(present >= target or plan.wait_s is not None, "what is missing has its next attempt")
    staying = len(after.fleet.staying) + len(after.fleet.starting)
    joining = any(e.in_transition and e.place is Place.STARTING for e in before.engines)
    _law(staying <= target or joining, "what is not wanted leaves")
    requested = before.state.change.stage.name == "REQUESTED"
    _law(present >= target or not requested, "a request waits for no back-off")


def _check_failure(before: World, batch: Batch, after: World) -> None:
    change, target = after.state.change, before.state.change.target
    expected = max(before.whole, before.fleet.num_present)
    if batch.is_requested and expected < target:
        _law(change.stage.name == "FAILED", "a requested start that fails ends the change")
        _law(change.target == expected, f"the old size is kept: {expected}, not {change.target}")
    else:
        _law(change == before.state.change, "nothing else ends a change")


def _is_whole(fleet: FleetView, target: int) -> bool:
    moving = fleet.is_committing or fleet.starting or fleet.any_leaving
    return len(fleet.staying) == target and not moving


def _law(holds: bool, text: str) -> None:
    if not holds:
        raise Violation(text)


def _ordered(engines: list[EngineStatus]) -> tuple[EngineStatus, ...]:
    return tuple(sorted(engines, key=lambda engine: engine.rank))


def _without(world: World, rank: int) -> World:
    engines = tuple(engine for engine in world.engines if engine.rank != rank)
    return replace(world, engines=engines, is_planned=False)


def _with(world: World, engine: EngineStatus) -> World:
    engines = [e for e in world.engines if e.rank != engine.rank]
    return replace(world, engines=_ordered([*engines, engine]), is_planned=False)


def _put_batch(world: World, number: int, batch: Batch | None) -> World:
    batches = list(world.batches)
    batches[number : number + 1] = [] if batch is None else [batch]
    return replace(world, batches=tuple(batches), is_planned=False)


def _spend(world: World, kind: str) -> World:
    left = replace(world.left, **{kind: getattr(world.left, kind) - 1})
    return replace(world, left=left, is_planned=False)


def explore(bounds: Bounds, control: ModuleType = control_state, limit: int = 200_000) -> int:
    """Visits every world within the bounds. Raises `Violation`, or returns the number of worlds."""
    model = Model(bounds, control)
    first = model.first()
    parents: dict[object, tuple[object, str]] = {}
    seen, todo = {first.key}, [first]
    while todo:
        world = todo.pop()
        try:
            model.check(world)
            moves = [*model.owed(world), *model.free(world)]
            model.rest(world)
        except Violation as violation:
            raise Violation(f"{violation}, after {_trace(parents, world.key)}") from None
        for name, after in moves:
            if after.key not in seen:
                seen.add(after.key)
                parents[after.key] = (world.key, name)
                todo.append(after)
        if len(seen) > limit:
            raise Violation(f"more than {limit} worlds: it does not end")
    return len(seen)


def _trace(parents: dict[object, tuple[object, str]], key: object) -> str:
    names = []
    while key in parents:
        key, name = parents[key]
        names.append(name)
    return ", ".join(reversed(names))
