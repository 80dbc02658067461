"""Decides which engine starts, leaves or stays next, so that versions change. Pure: time is an
argument.

Rules. An unfinished response continues only on engines of its version; ingresses enforce that. So
the last engine of a version stops only when no ingress needs the version, and if it dies while an
ingress still needs it, a new one is started. There is at most one engine more than the target
number:

    extra engine starts ---> it serves ---> one of an older version leaves ---> it is gone  ---+
          ^                                                                                    |
          +---------------------------------- until none is older -----------------------------+

Without room for an extra engine, an engine of an older version leaves first, and its successor
takes its place. The same happens if engines of the older version are missing and do not start
again.

If versions differ only in their weights, no process starts: an engine leaves, loads the other
weights, and joins again. The first engine proves the new weights; then up to half of the engines
may reload at a time.

An engine that unfinished responses need has priority over all others, even if there is no room for
it: it waits for room, nothing else starts meanwhile, and another engine gives way:

    one that starts;
    else one of several that serve the same version: its requests continue on the others;
    else the last one of a version: it gets no new requests, and stops when it is idle.

The engine then serves until no ingress needs it, and is replaced again. If there is room for only
one engine, the versions take turns. An engine that gave way unnecessarily is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
from msgspec.structs import replace

from swell.cluster.control.plan.backoff import TICK_S
from swell.cluster.control.plan.fleet_view import EngineStatus, FleetView, Intent, Place
from swell.cluster.control.plan.upgrade import UpgradeState, observe
from swell.cluster.control.plan.versions import UpgradeStage, Version

ROOM_S = 10.0
"""How long terminated engines may hold their resources: no other engine gives way meanwhile."""


class UpgradePlan(msgspec.Struct, frozen=True):
    """The next steps, by rank."""

    held: frozenset[int] = frozenset()
    """Leaving engines that stop only when no ingress needs their version."""
    vacating: frozenset[int] = frozenset()
    """Leaving engines that count until they are gone: others take their places."""
    keep: tuple[int, ...] = ()
    """Leaving engines that stay after all."""
    cancel: tuple[int, ...] = ()
    leave: tuple[int, ...] = ()
    """Engines that leave because another version is the target."""
    reload: tuple[int, ...] = ()
    """Engines that leave to load the weights of the target version, and join again."""
    retarget: tuple[int, ...] = ()
    """Engines that are leaving for outdated weights, and load the weights of the target version
    instead."""
    gives_way: int | None = None
    """The engine that leaves to make room. It may be kept."""
    start: Version | None = None
    is_extra: bool = False
    """`start` is an extra engine, in addition to the target number."""
    for_answers: bool = False
    """`start` waits for room, and others give way."""
    takes_place: int | None = None
    """An extra engine that counts towards the target from now on."""
    is_reserved: bool = False
    """All room is reserved for an engine that waits: nothing else starts."""
    wait_s: float | None = None
    """Seconds until the next plan if nothing happens; None: plan only after an event."""

    @property
    def changes_something(self) -> bool:
        """Whether the plan changes the fleet, so that the next plan must be made at once from a new
        view."""
        is_moved = self.gives_way is not None or self.start is not None
        return is_moved or bool(self.keep or self.cancel or self.leave or self.reload)


def plan(
    state: UpgradeState,
    fleet: FleetView,
    target: int,
    needed: Collection[str],
    now: float,
    *,
    asleep: bool = False,
) -> tuple[UpgradeState, UpgradePlan]:
    """Plans the next steps. `target`: the target number of engines. `needed`: names of the versions
    of unfinished responses. `asleep`: an operator has put engines to sleep, so none takes memory to
    load weights."""
    state = observe(state, fleet, target, now)
    state, done = _decide(state, fleet, target, needed, now, asleep=asleep)
    leaving = {engine.rank for engine in _leaving(fleet)} | set(done.leave) | set(done.reload)
    if done.gives_way is not None:
        leaving.add(done.gives_way)
    leaving -= set(done.keep)
    held = _last_of_version(fleet, leaving, state.starts.name, done.reload)
    vacating = frozenset(leaving) if state.record.in_place else frozenset[int]()
    return state, replace(done, held=held, vacating=vacating)


def _decide(
    state: UpgradeState,
    fleet: FleetView,
    target: int,
    needed: Collection[str],
    now: float,
    *,
    asleep: bool,
) -> tuple[UpgradeState, UpgradePlan]:
    """Decides everything except `held` and `vacating`, which follow from the leaving engines."""
    record, staying = state.record, fleet.of(Place.SERVING)
    outdated = [engine.rank for engine in staying if engine.version != record.wanted]
    surplus = len(staying) - target
    wanted = {record.wanted, state.starts.name, *needed}
    needed = record.known(sorted(needed))
    waiting = _waiting(fleet, needed)
    starting = [engine for engine in fleet.of(Place.STARTING) if not engine.in_transition]
    useless = [e for e in starting if e.for_answers and e.waits_for_room and e not in waiting]
    related = _weights_lineage(state)
    useless += [e for e in starting if e.version not in {*wanted, *related} and not e.previous]
    reloads, others = _leaving_to_reload(fleet), related - {record.wanted}
    in_vain = [engine for engine in reloads if asleep or engine.version not in others]
    done = UpgradePlan(
        cancel=tuple(e.rank for e in starting if e in useless),
        leave=tuple(outdated[-surplus:]) if surplus > 0 else (),
        keep=tuple(engine.rank for engine in in_vain),
        retarget=tuple(
            e.rank for e in reloads if e not in in_vain and e.next_version != record.wanted
        ),
        is_reserved=bool(waiting),
    )
    if done.leave or done.cancel or done.keep:
        return state, done
    if waiting:
        return _give_way(state, fleet, waiting[0], needed, done, now)
    if state.gives_way is not None:
        return _take_back(state, fleet, done)
    missing = unmet(fleet, needed)
    waits = {name: state.wait_s(name, now) for name in missing}
    if ready := [name for name in missing if not waits[name]]:
        return state, _start_for_answers(state, fleet, target, ready[0], needed, done)
    if outdated and _is_quiet(state, fleet, target):
        return _replace(state, fleet, outdated, done, now, asleep=asleep)
    return state, replace(done, wait_s=min(waits.values(), default=None))


def unmet(fleet: FleetView, needed: Sequence[str]) -> list[str]:
    """Returns the versions of unfinished responses that no engine serves or is starting with."""
    there = {engine.version for engine in fleet.engines if engine.place is not Place.ENDING}
    return [name for name in needed if name not in there]


# -------------------------------------------------------------------------------- responses


def _with_room(fleet: FleetView) -> list[EngineStatus]:
    there = (engine for engine in fleet.engines if engine.place is not Place.ENDING)
    return [engine for engine in there if not engine.waits_for_room]


def _waiting(fleet: FleetView, needed: Sequence[str]) -> list[EngineStatus]:
    """Returns the engines that wait for room and that unfinished responses need."""
    served = {engine.version for engine in _with_room(fleet)}
    return [
        engine
        for engine in fleet.of(Place.STARTING)
        if engine.waits_for_room and engine.version in needed and engine.version not in served
    ]


def _is_only_one(engine: EngineStatus, fleet: FleetView, needed: Sequence[str]) -> bool:
    """Whether unfinished responses need its version and no other engine runs it."""
    others = (each for each in _with_room(fleet) if each.rank != engine.rank)
    return engine.version in needed and all(each.version != engine.version for each in others)


def _give_way(
    state: UpgradeState,
    fleet: FleetView,
    waiting: EngineStatus,
    needed: Sequence[str],
    done: UpgradePlan,
    now: float,
) -> tuple[UpgradeState, UpgradePlan]:
    """Decides which engine makes room for `waiting`. It must be gone before the next one gives
    way."""
    starting = fleet.of(Place.STARTING)
    leaving = {engine.rank for engine in _leaving(fleet)}
    held = _last_of_version(fleet, leaving, state.starts.name)
    is_going = any(_is_going(engine, held, state.gives_way) for engine in fleet.engines)
    if is_going or any(engine.in_transition for engine in starting):
        return state, done
    if (left_s := state.freed_at + ROOM_S - now) > TICK_S:
        return state, replace(done, wait_s=left_s)
    others = [engine for engine in starting if not _is_only_one(engine, fleet, needed)]
    if others:
        last = [engine for engine in others if not engine.waits_for_room][-1:]
        ends = [*last, *(engine for engine in others if engine.waits_for_room)]
        done = replace(done, cancel=tuple(engine.rank for engine in ends))
        return state, _with_place(done, waiting, is_free=not all(e.is_extra for e in ends))
    rank = _most_dispensable(fleet.of(Place.SERVING), state.record.wanted, needed)
    if rank is None:
        return state, done
    record = replace(state.record, in_place=True)
    state = replace(state, record=record, gives_way=rank)
    return state, _with_place(replace(done, gives_way=rank), waiting, is_free=True)


def _is_going(engine: EngineStatus, held: Collection[int], gives_way: int | None) -> bool:
    """Whether the engine's room will be free soon. A held engine may take hours until its responses
    have finished, so it counts only if it is the one that gives way."""
    leaves = engine.intent in (Intent.LEAVE, Intent.DRAIN)
    is_held = engine.rank in held and engine.rank != gives_way
    return engine.place is Place.ENDING or (leaves and not is_held)


def _most_dispensable(
    staying: list[EngineStatus], wanted: str, needed: Sequence[str]
) -> int | None:
    """Returns the rank of the engine that is needed least; None: no engine serves."""
    versions = [engine.version for engine in staying]

    def reluctance(engine: EngineStatus) -> tuple[bool, bool, bool, int]:
        is_last = versions.count(engine.version) == 1
        return is_last, engine.version == wanted, engine.version in needed, -engine.rank

    return min(staying, key=reluctance).rank if staying else None


def _with_place(done: UpgradePlan, waiting: EngineStatus, *, is_free: bool) -> UpgradePlan:
    """Lets a waiting extra engine count towards the target, if the place that becomes free did.
    `is_free`: whether it did."""
    return replace(done, takes_place=waiting.rank) if is_free and waiting.is_extra else done


def _take_back(
    state: UpgradeState, fleet: FleetView, done: UpgradePlan
) -> tuple[UpgradeState, UpgradePlan]:
    """Keeps the engine that gives way if it has not left: nothing waits for its room any more."""
    keep = tuple(rank for rank in fleet.can_be_kept if rank == state.gives_way)
    return replace(state, gives_way=None), replace(done, keep=keep)


def _start_for_answers(
    state: UpgradeState,
    fleet: FleetView,
    target: int,
    version: str,
    needed: Sequence[str],
    done: UpgradePlan,
) -> UpgradePlan:
    """Starts an engine of a needed version, in a free place or as an extra one."""
    if any(engine.place is Place.ENDING and engine.is_present for engine in fleet.engines):
        return done  # its successor comes first
    is_extra = fleet.num_present >= target
    if not is_extra and version == state.starts.name:
        return done  # the regular replacement starts it
    if any(engine.is_extra for engine in fleet.engines):
        extras = (engine for engine in fleet.of(Place.STARTING) if engine.is_extra)
        ends = (e for e in extras if not (e.in_transition or _is_only_one(e, fleet, needed)))
        return replace(done, cancel=tuple(engine.rank for engine in ends))
    start = state.record.get(version)
    return replace(done, start=start, is_extra=is_extra, for_answers=True)


# -------------------------------------------------------------------------------- outdated engines


def _is_quiet(state: UpgradeState, fleet: FleetView, target: int) -> bool:
    """Whether the target number of engines serves, or as many as there is room for, and nothing
    else is in progress."""
    waits = [engine for engine in fleet.engines if engine.waits_for_room]
    is_idle = len(fleet.of(Place.SERVING)) + len(waits) == len(fleet.engines)
    is_whole = len(fleet.engines) == target and not waits
    return is_idle and not fleet.is_committing and (is_whole or state.lacks_room(fleet))


def _replace(
    state: UpgradeState,
    fleet: FleetView,
    outdated: Sequence[int],
    done: UpgradePlan,
    now: float,
    *,
    asleep: bool,
) -> tuple[UpgradeState, UpgradePlan]:
    """Replaces one outdated engine: its successor starts first or takes its place, or the engine
    reloads."""
    record, wanted = state.record, state.record.wanted
    if reload := _to_reload(state, fleet, outdated):
        wait_s = state.wait_s(wanted, now)
        if not (wait_s or asleep):
            done = replace(done, reload=reload)
        return state, replace(done, wait_s=wait_s or None)
    pending = (engine for engine in fleet.engines if engine.waits_for_room and not engine.is_extra)
    waits = any(engine.version == wanted for engine in pending)
    is_the_only_one = len(fleet.of(Place.SERVING)) == 1
    no_room = waits or state.no_room_beside == wanted
    may_leave = not is_the_only_one or (no_room and not state.is_untried)
    if (record.in_place or waits) and may_leave:
        record = replace(record, in_place=True)
        state = replace(state, record=record, no_room_beside="")
        return state, replace(done, leave=(outdated[-1],))
    if any(engine.is_extra for engine in fleet.engines):
        return state, done
    if wait_s := state.wait_s(wanted, now):
        return state, replace(done, wait_s=wait_s)
    return state, replace(done, start=record.get(wanted), is_extra=True)


def _to_reload(state: UpgradeState, fleet: FleetView, outdated: Sequence[int]) -> tuple[int, ...]:
    """Returns the engines that load the target weights next. The last outdated engine does not
    reload together with others: until then responses of its version can continue there. Empty if an
    earlier version is the target again and its weights could not be loaded twice: its engines are
    replaced instead."""
    record = state.record
    if record.stage is not UpgradeStage.IN_PROGRESS and state.was_tried_again(record.wanted):
        return ()
    related = _weights_lineage(state)
    same = [e.rank for e in fleet.engines if e.rank in outdated and e.version in related]
    half = 1 if state.is_untried else max(1, len(fleet.of(Place.SERVING)) // 2)
    count = min(half, max(1, len(outdated) - 1))
    return tuple(same[-count:])


def _weights_lineage(state: UpgradeState) -> frozenset[str]:
    """Returns the names of versions whose engines may load the target weights in place of
    theirs."""
    weights_lineage = state.record.get(state.record.wanted).weights_lineage
    return frozenset(
        each.name for each in state.record.versions if each.weights_lineage == weights_lineage
    )


def _leaving_to_reload(fleet: FleetView) -> list[EngineStatus]:
    """Returns the reloading engines that have not left yet."""
    leaving = (engine for engine in _leaving(fleet) if not engine.in_transition)
    return [engine for engine in leaving if engine.intent is Intent.RELOAD]


def _leaving(fleet: FleetView) -> list[EngineStatus]:
    serving = (engine for engine in fleet.engines if engine.place is Place.SERVING)
    return [engine for engine in serving if engine.intent is not Intent.STAY]


def _last_of_version(
    fleet: FleetView, leaving: Collection[int], starts: str, reload: Collection[int] = ()
) -> frozenset[int]:
    """Returns the leaving engines whose responses no other engine can continue. `starts`: the
    version of replacements; if all engines run it, a replacement will come, unless they reload."""
    is_reloading = bool(reload) or any(e.intent is Intent.RELOAD for e in fleet.engines)
    if not is_reloading and {engine.version for engine in fleet.engines} <= {starts}:
        return frozenset()
    serving = [engine for engine in fleet.engines if engine.place is Place.SERVING]
    there = {engine.version for engine in serving if engine.rank not in leaving}
    ends = (engine for engine in serving if engine.rank in leaving)
    return frozenset(engine.rank for engine in ends if engine.version not in there)
