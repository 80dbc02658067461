"""Every move of the model, and the definition of a quiescent state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields

from swell.coordinator.roster import Member
from swell.coordinator.transport.channel import ChannelAddress
from swell.coordinator.wave_protocol.wave_interface import GroupState, Phase
from swell.coordinator.wave_protocol.waves import WaveCoordinator
from swell.coordinator.wire import (
    Broken,
    EngineHello,
    EngineReport,
    Joined,
    Paused,
    Repaired,
    StartWave,
    WaveComplete,
)
from tests.coordinator.wave_protocol.model import Model
from tests.coordinator.wave_protocol.model_state import (
    Bounds,
    Budget,
    Engine,
    EngineState,
    Fields,
    Group,
    Job,
    Packed,
    State,
    Transition,
    Violation,
    pack,
)

_PAUSE_REQUESTED, _TARGET_RANKS = (
    [field.name for field in fields(WaveCoordinator)].index(name)
    for name in ("pause_requested", "target_ranks")
)
_NOWHERE = ChannelAddress("", "", "")


def moves(model: Model, state: State) -> Iterator[Transition]:
    """Yields every move that can happen next."""
    for rank, engine in enumerate(state.engines):
        if engine.outbox:
            yield f"{rank} is delivered", True, _deliver(model, state, rank)
        if engine.place is EngineState.DEAD:
            if rank in state.unnoticed and state.coordinator is not None:
                yield f"{rank} is noticed", True, _notice_death(model, state, rank)
            continue
        for name, owed, after in _engine_moves(model, state, rank, engine):
            yield f"{rank} {name}", owed, after
        for name, after in _accidents(model, state, rank, engine):
            yield f"{rank} {name}", False, after
    if state.coordinator is None:
        if all(_has_sent_hello(state, r) for r, e in enumerate(state.engines) if e.place):
            yield "recover", True, _recover(model, state)
        return
    yield from _operator(model, state)


def spend(state: State, name: str) -> State:
    return state._replace(left=state.left._replace(**{name: getattr(state.left, name) - 1}))


# -------------------------------------------------------------------- an engine


def _engine_moves(model: Model, state: State, rank: int, engine: Engine) -> Iterator[Transition]:
    listens = model.listens(state, rank)
    if engine.inbox and (listens or model.is_aborted(engine)):
        yield "takes", True, model.take(state, rank)
    elif state.coordinator is None and not engine.greeted:
        # A restart of the coordinator takes longer than one iteration of the engine's loop.
        yield "greets", True, _greet(model, state, rank)
    if state.coordinator is not None and model.bounds.reports and not engine.outbox:
        after = _report(model, state, _reported(rank, engine))
        if after != state:
            yield "reports", True, after
    if state.left.late_reports and state.coordinator is not None:
        said = (_reported(rank, engine),)
        yield (
            "will report",
            False,
            spend(model.with_engine(state, rank, engine, said), "late_reports"),
        )
    if engine.place is EngineState.INSIDE:
        if model.may_submit(rank, engine.fields):
            yield "submits", True, model.submit(state, rank)
        elif engine.fields.in_flight and (steps := model.oldest(state, rank)):
            yield "reads", True, model.read(state, rank, steps)
    elif engine.place is EngineState.FORMING:
        if all(_arrived(state.engines[r], engine.fields.epoch) for r in engine.fields.ranks):
            yield "forms", True, _join(model, state, rank)
    elif engine.place is EngineState.REPAIRING:
        repaired = engine._replace(place=EngineState.BROKEN)
        said = (pack(Repaired(rank, 0)),)
        yield "is repaired", True, model.with_engine(state, rank, repaired, said)
    if listens and state.left.requests and rank in state.desired:
        yield "gets a request", False, _request(model, state, rank)


def _accidents(
    model: Model, state: State, rank: int, engine: Engine
) -> Iterator[tuple[str, State]]:
    if state.left.drops and engine.inbox:
        after = model.with_engine(state, rank, engine._replace(inbox=()))
        yield "receives nothing", spend(after, "drops")
    if state.left.drops and engine.outbox:
        # A new coordinator that receives an engine's report asks it to introduce itself again.
        greeted = engine.greeted and state.coordinator is not None
        after = model.with_engine(state, rank, engine._replace(outbox=(), greeted=greeted))
        yield "is not heard", spend(after, "drops")
    if state.left.deaths:
        yield "dies", spend(_die(model, state, rank), "deaths")
    if state.left.alones and engine.place in (EngineState.BROKEN, EngineState.INSIDE):
        left = model.leave(state, rank)
        after, may = model.call_engine(left, rank, "serve_standalone", engine.fields.epoch)
        if may:
            broken = after.engines[rank]._replace(place=EngineState.BROKEN)
            yield "goes on alone", spend(model.with_engine(after, rank, broken), "alones")
    if state.left.losses and engine.place in (
        EngineState.INSIDE,
        EngineState.FORMING,
        EngineState.BROKEN,
    ):
        yield "loses a worker", spend(model.fall_out(state, rank, EngineState.REPAIRING), "losses")
    if state.left.errors and (
        model.is_aborted(engine)
        if engine.place in (EngineState.INSIDE, EngineState.FORMING)
        else False
    ):
        yield "is aborted", spend(model.fall_out(state, rank, EngineState.BROKEN), "errors")
    elif state.left.errors and _is_only_engine(state, engine):
        yield "sees an error", spend(model.fall_out(state, rank, EngineState.BROKEN), "errors")


def _is_only_engine(state: State, engine: Engine) -> bool:
    """Whether a peer of the steps in flight, or of the group that forms, is gone."""
    epoch = engine.fields.epoch
    if engine.place is EngineState.INSIDE and engine.fields.in_flight:
        return any(-1 in group.reads for group in state.groups if group.epoch == epoch)
    if engine.place is not EngineState.FORMING:
        return False
    peers = [state.engines[rank] for rank in engine.fields.ranks]
    return any(p.fields.epoch > epoch or (_gone(p) and p.fields.epoch == epoch) for p in peers) or (
        any(p.place is EngineState.DEAD for p in peers)
    )


def _gone(engine: Engine) -> bool:
    return engine.place not in (EngineState.INSIDE, EngineState.FORMING)


def _arrived(engine: Engine, epoch: int) -> bool:
    return engine.fields.epoch == epoch and not _gone(engine)


def _join(model: Model, state: State, rank: int) -> State:
    state, _ = model.call_engine(state, rank, "joined")
    engine = state.engines[rank]
    captured = model.captured_when_joining(engine)
    engine = engine._replace(place=EngineState.INSIDE, captured=captured)
    state = model.with_engine(state, rank, engine)
    epoch, ranks = engine.fields.epoch, engine.fields.ranks
    if any(group.epoch == epoch for group in state.groups):
        return state
    group = Group(epoch, ranks, ((),) * len(ranks), (0,) * len(ranks))
    return state._replace(groups=(*state.groups, group))


def _request(model: Model, state: State, rank: int) -> State:
    arrived = len(model.bounds.jobs) - state.left.requests
    kind, steps = model.bounds.jobs[arrived]
    engine = state.engines[rank]
    jobs = (*engine.jobs, Job(arrived, kind, steps, steps))
    state = model.with_engine(state, rank, engine._replace(jobs=jobs))
    if engine.place is EngineState.INSIDE:
        state, _ = model.call_engine(state, rank, "work_arrived")
    return spend(state, "requests")


def _die(model: Model, state: State, rank: int) -> State:
    state = model.leave(state, rank)
    engine = state.engines[rank]._replace(
        place=EngineState.DEAD,
        fields=Fields(epoch=state.engines[rank].fields.epoch),
        jobs=(),
        inbox=(),
    )
    state = model.with_engine(state, rank, engine)
    return state._replace(unnoticed=state.unnoticed | {rank})


# -------------------------------------------------------------------- the coordinator


def _deliver(model: Model, state: State, rank: int) -> State:
    engine = state.engines[rank]
    message = engine.outbox[0]
    state = model.with_engine(state, rank, engine._replace(outbox=engine.outbox[1:]))
    if state.coordinator is not None:
        return _HANDLERS[message[0]](model, state, message)
    if message[0] is not EngineHello:
        return state
    return state._replace(hellos=tuple(sorted((*state.hellos, message), key=lambda m: m[1].rank)))


def _start_wave(model: Model, state: State, message: Packed) -> State:
    return model.command(state, "start_wave", message[1], message[3], message[4])


def _wave_complete(model: Model, state: State, message: Packed) -> State:
    return model.command(state, "wave_complete", message[3], message[4])


def _paused(model: Model, state: State, message: Packed) -> State:
    return model.command(state, "paused", message[1], message[3], message[4])


def _joined(model: Model, state: State, message: Packed) -> State:
    return model.command(state, "joined", message[1], message[3])


def _broken(model: Model, state: State, message: Packed) -> State:
    if message[5]:
        return _change_target(model, state, _target_ranks(state) - {message[1]}, lost=True)
    return model.command(state, "broken", message[3])


def _repaired(model: Model, state: State, message: Packed) -> State:
    return _change_target(model, state, _target_ranks(state) | ({message[1]} & state.desired))


def _report(model: Model, state: State, message: Packed) -> State:
    return model.command(state, "report", *message[1:])


def _late_hello(model: Model, state: State, message: Packed) -> State:
    return state


_HANDLERS: dict[type, Callable[[Model, State, Packed], State]] = {
    StartWave: _start_wave,
    WaveComplete: _wave_complete,
    Paused: _paused,
    Joined: _joined,
    Broken: _broken,
    Repaired: _repaired,
    EngineReport: _report,
    EngineHello: _late_hello,
}


def _reported(rank: int, engine: Engine) -> Packed:
    fields = engine.fields
    return (EngineReport, rank, fields.epoch, fields.wave, fields.phase, fields.voting)


def _target_ranks(state: State) -> frozenset[int]:
    assert state.coordinator is not None
    return frozenset(state.coordinator[_TARGET_RANKS])


def _change_target(model: Model, state: State, wanted: frozenset[int], lost: bool = False) -> State:
    return model.command(state, "change", tuple(sorted(wanted)), lost)


# -------------------------------------------------------------------- manager and operator


def _notice_death(model: Model, state: State, rank: int) -> State:
    """The manager notices a dead engine, whose undelivered messages are dropped."""
    state = model.with_engine(state, rank, state.engines[rank]._replace(outbox=()))
    state = state._replace(desired=state.desired - {rank}, unnoticed=state.unnoticed - {rank})
    return _change_target(model, state, _target_ranks(state) - {rank}, lost=True)


def _operator(model: Model, state: State) -> Iterator[Transition]:
    assert state.coordinator is not None
    left, wanted = state.left, _target_ranks(state)
    if left.pauses:
        yield "pause", False, spend(model.command(state, "pause"), "pauses")
    if state.coordinator[_PAUSE_REQUESTED]:
        yield "resume", False, model.command(state, "resume")
    if unwanted := wanted - state.desired - state.unnoticed:
        yield "detach again", True, _change_target(model, state, wanted - unwanted)
    if left.joins:
        rank = len(state.engines) - left.joins
        if state.engines[rank].place is not EngineState.DEAD:
            after = _change_target(model, state, wanted | {rank})
            after = after._replace(desired=state.desired | {rank})
            yield f"{rank} is wanted", False, spend(after, "joins")
    if left.detaches:
        for rank in sorted(wanted & state.desired) if len(state.desired) > 1 else ():
            after = _change_target(model, state, wanted - {rank})
            after = after._replace(desired=state.desired - {rank})
            yield f"{rank} is to detach", False, spend(after, "detaches")
    if left.restarts:
        for name, kept in (("messages are lost", False), ("messages arrive", True)):
            engines = tuple(
                e._replace(
                    inbox=e.inbox if kept else (), outbox=(), greeted=e.place is EngineState.DEAD
                )
                for e in state.engines
            )
            after = state._replace(engines=engines, coordinator=None, hellos=())
            yield f"the coordinator dies, {name}", False, spend(after, "restarts")


def _greet(model: Model, state: State, rank: int) -> State:
    engine = state.engines[rank]
    epoch, wave, phase, ranks = engine.fields[:4]
    number = engine.fields.pause_number
    hello = EngineHello(Member(rank, _NOWHERE), epoch, list(ranks), wave, phase, number)
    return model.with_engine(state, rank, engine._replace(greeted=True), (pack(hello),))


def _has_sent_hello(state: State, rank: int) -> bool:
    return any(hello[1].rank == rank for hello in state.hellos)


def _recover(model: Model, state: State) -> State:
    fresh = state._replace(coordinator=model.fresh(), hellos=())
    return model.command(fresh, "recover", state.hellos)


# -------------------------------------------------------------------- quiescence


def check(state: State) -> None:
    """Checks the invariants of every state; raises `Violation`."""
    for group in state.groups:
        members = [
            (state.engines[rank].fields, len(log))
            for rank, log, read in zip(group.ranks, group.logs, group.reads, strict=True)
            if read >= 0 and state.engines[rank].place is EngineState.INSIDE
        ]
        halted = all(f.phase in (Phase.STOPPED, Phase.PAUSED) for f, _ in members)
        if halted and len(members) == len(group.ranks) and len({steps for _, steps in members}) > 1:
            raise Violation(f"all of epoch {group.epoch} are halted behind different steps")
    if state.coordinator is None:
        return
    coordinator = WaveCoordinator(*state.coordinator)
    if coordinator.group_state is not GroupState.PAUSED:
        return
    for rank in coordinator.ranks:
        engine = state.engines[rank]
        inside = engine.place is EngineState.INSIDE and engine.fields.epoch == coordinator.epoch
        if inside and engine.fields.phase is not Phase.PAUSED:
            raise Violation(f"the coordinator believes that engine {rank} is paused")


def is_quiescent(state: State, bounds: Bounds) -> bool:
    """Whether nothing is owed, the group is the desired one, and no work is left in it."""
    if state.coordinator is None or state.unnoticed:
        return False
    if any(e.inbox or e.outbox or e.place is EngineState.REPAIRING for e in state.engines):
        return False
    coordinator = WaveCoordinator(*state.coordinator)
    pause_requested = coordinator.pause_requested
    group = tuple(sorted(state.desired))
    phase = Phase.PAUSED if pause_requested else Phase.STOPPED
    group_state = GroupState.PAUSED if pause_requested and group else GroupState.SERVING
    return (
        coordinator.ranks == coordinator.target_ranks == group
        and coordinator.group_state is group_state
        and (pause_requested or not coordinator.running)
        and all(
            _rests(engine, coordinator, phase)
            if rank in group
            else engine.fields.phase is Phase.OUT or _is_excused(state.left, bounds)
            for rank, engine in enumerate(state.engines)
        )
    )


def _is_excused(left: Budget, bounds: Bounds) -> bool:
    """Whether a removed engine may not know of its removal; the manager terminates it anyway."""
    return left.restarts < bounds.restarts or left.drops < bounds.drops


def _rests(engine: Engine, coordinator: WaveCoordinator, phase: Phase) -> bool:
    fields = engine.fields
    return (
        engine.place is EngineState.INSIDE
        and (fields.epoch, fields.wave) == (coordinator.epoch, coordinator.wave)
        and (fields.phase, fields.in_flight) == (phase, 0)
        and (phase is Phase.PAUSED or not engine.jobs)
    )
