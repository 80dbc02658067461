"""Decisions of a manager: one state, one `Change`, and the next steps. Pure: time is an argument.

The manager follows one change of the number of engines, the newest one:

               +------------------- scale: the newest target replaces the older one --------------+
               v                                                                                  |
           REQUESTED --- plan ---> IN_PROGRESS --- all serve, none is leaving ---> SETTLED -------+
                                       |                                                          |
                                       +--- one of its engines does not start ---> FAILED --------+

An engine that died is replaced in every stage, and failed starts are retried with a growing delay.
Only a failed start that belongs to a requested change ends that change: the target then falls back
to `Change.fallback`, or to the number of engines that are present if that is greater.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from swell.cluster.control.plan.backoff import Backoff, MissingEngine
from swell.cluster.control.plan.checkpoint import ClusterCheckpoint
from swell.cluster.control.plan.fleet_view import FleetView, Intent, Place
from swell.configs.schema import ClusterConfig, Config
from swell.coordinator.manager_state import Sleep

TAKEN_OVER = "another manager has taken over in the meantime: send the request again"


class ScaleRefused(ValueError):
    """Raised for a change that cannot be made; the message says why."""


class Leadership(enum.Enum):
    """Leadership of one manager. If an application has several managers, the one that took over
    last leads."""

    CANDIDATE = "candidate"
    """This manager has not taken over yet."""
    LEADER = "leader"
    ENDING = "ending"
    """This manager ends the cluster: it still leads, and changes nothing more."""
    DEPOSED = "deposed"
    """Another manager has taken over: this one does nothing more."""


class ChangeStage(enum.Enum):
    REQUESTED = "requested"
    """Nothing has been done for the change yet."""
    IN_PROGRESS = "in progress"
    SETTLED = "settled"
    """The target number of engines has served at the same time. An engine that dies later does not
    start a new change."""
    FAILED = "failed"


class Change(msgspec.Struct, frozen=True):
    """The newest requested number of engines, and the progress of the cluster towards it."""

    target: int
    fallback: int
    """The target after a failed start: the smallest number requested since the cluster was
    complete."""
    drain_timeout_s: float
    """How long leaving engines may finish their requests."""
    stage: ChangeStage = ChangeStage.IN_PROGRESS
    error: str | None = None
    """Why the change failed; None in every other stage."""
    missed: int = 0
    """The number of engines that was requested, if the change failed."""


class ControlState(msgspec.Struct, frozen=True):
    """The manager's desired state, and what it remembers of its actions."""

    change: Change
    leadership: Leadership = Leadership.CANDIDATE
    pause_requested: bool = False
    """An operator has requested a pause."""
    sleep: Sleep = Sleep()
    """The requested sleep level of paused engines."""
    cache_generation: int = 0
    """See `DesiredState`."""
    has_served: bool = False
    """The cluster has served once: from then on a failed start never stops the application."""
    backoff: Backoff = msgspec.field(default_factory=Backoff)


class Plan(msgspec.Struct, frozen=True):
    """The next steps, by rank."""

    keep: tuple[int, ...] = ()
    """Leaving engines that stay after all."""
    cancel: tuple[int, ...] = ()
    """Starting engines that are no longer needed."""
    leave: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    is_requested: bool = False
    """The starts belong to a requested change. If False, they replace engines or are the first
    ones."""
    wait_s: float | None = None
    """Seconds until the next plan if nothing happens; None: plan only after an event."""


def initial(config: Config) -> ControlState:
    count = config.parallel.data
    return ControlState(Change(count, count, config.cluster.drain_timeout_s))


def take_over(
    state: ControlState, checkpoint: ClusterCheckpoint, *, is_paused: bool, limits: ClusterConfig
) -> ControlState:
    """Becomes the leader with the checkpoint of the previous manager. `is_paused`: whether the
    engines are paused; it counts only if the checkpoint is empty."""
    desired = checkpoint.desired
    target = _within(desired.target or state.change.target, limits)
    return replace(
        state,
        change=replace(state.change, target=target, fallback=target),
        leadership=Leadership.LEADER,
        pause_requested=desired.pause_requested if desired.target else is_paused,
        sleep=desired.sleep,
        cache_generation=desired.cache_generation,
        has_served=desired.served,
    )


def adopt(state: ControlState, fleet: FleetView, limits: ClusterConfig) -> ControlState:
    """Keeps every engine that was found serving, because no checkpoint has a target."""
    target = _within(max(state.change.target, len(fleet.staying)), limits)
    return replace(state, change=replace(state.change, target=target, fallback=target))


def scale(
    state: ControlState,
    fleet: FleetView,
    engines: int,
    limits: ClusterConfig,
    drain_timeout_s: float | None = None,
) -> ControlState:
    """Sets the target number of engines. Raises ScaleRefused."""
    check_accepts(state)
    if engines != _within(engines, limits):
        raise ScaleRefused(
            f"engines={engines} must be between cluster.min_engines={limits.min_engines} and "
            f"cluster.max_engines={limits.max_engines}"
        )
    change = _settle(state.change, fleet)
    under_way = change.stage in (ChangeStage.REQUESTED, ChangeStage.IN_PROGRESS)
    change = Change(
        engines,
        min(change.fallback if under_way else change.target, engines),
        limits.drain_timeout_s if drain_timeout_s is None else drain_timeout_s,
        ChangeStage.REQUESTED,
    )
    return replace(state, change=change, backoff=Backoff())


def drain(state: ControlState, fleet: FleetView, rank: int, limits: ClusterConfig) -> ControlState:
    """Lets one engine leave and lowers the target by one, unless the engine is already leaving.
    Raises ScaleRefused."""
    serving = (engine for engine in fleet.engines if engine.place is Place.SERVING)
    intents = {engine.rank: engine.intent for engine in serving}
    match intents.get(rank):
        case Intent.STAY:
            return scale(state, fleet, state.change.target - 1, limits)
        case None:
            raise ScaleRefused(f"there is no engine {rank}; engines: {fleet.staying}")
        case Intent.MOVE:
            raise ScaleRefused(
                f"engine {rank} is already leaving: its host is being removed, and another engine "
                "is started in its place"
            )
        case Intent.RELOAD:
            raise ScaleRefused(
                f"engine {rank} is loading the weights of another version: try again when it serves"
            )
    check_accepts(state)
    return state


def check_accepts(state: ControlState) -> None:
    """Raises ScaleRefused if this manager makes no more changes."""
    if state.leadership is Leadership.DEPOSED:
        raise ScaleRefused(TAKEN_OVER)
    if state.leadership is Leadership.ENDING:
        raise ScaleRefused("the cluster is shutting down: nothing can be changed any more")


def check_awake(state: ControlState) -> None:
    """Raises ScaleRefused if engines sleep: they would need their memory to load other weights."""
    if state.sleep.level:
        raise ScaleRefused(
            f"the engines sleep (level {state.sleep.level}), and loading weights would use the "
            "memory that they have freed: wake them first (POST /admin/wake)"
        )


def follow_load(state: ControlState, engines: int, limits: ClusterConfig) -> ControlState:
    """Sets the target of the autoscaler. A failed start does not fail this change: it is retried
    with a growing delay as long as the load requires it."""
    change = Change(engines, engines, limits.drain_timeout_s, ChangeStage.REQUESTED)
    return replace(state, change=change)


def depose(state: ControlState) -> ControlState:
    """Records that another manager has taken over."""
    return replace(state, leadership=Leadership.DEPOSED)


def end(state: ControlState) -> ControlState:
    """Records that the manager ends the cluster."""
    return replace(state, leadership=Leadership.ENDING)


def set_pause(
    state: ControlState, pause_requested: bool, sleep: Sleep | None = None
) -> ControlState:
    """Starts a pause, with or without sleep, or ends it. During a pause the sleep level only rises:
    no engine wakes up to sleep less deeply. Raises ScaleRefused."""
    check_accepts(state)
    if sleep is None:
        sleep = state.sleep if pause_requested else Sleep()
    elif sleep.level < state.sleep.level:
        sleep = replace(sleep, level=state.sleep.level)
    return replace(state, pause_requested=pause_requested, sleep=sleep)


def reset_prefix_cache(state: ControlState) -> ControlState:
    """Makes later requests find no block that was computed before. Raises ScaleRefused."""
    check_accepts(state)
    return replace(state, cache_generation=state.cache_generation + 1)


def plan(state: ControlState, fleet: FleetView, now: float) -> tuple[ControlState, Plan]:
    """Decides the next steps. If engines are missing, the plan first keeps those that drain. If
    there are too many, it cancels starts, and lets serving engines leave only if none starts any
    more. Missing engines start at the lowest free ranks, as far as the back-off allows."""
    change = _settle(state.change, fleet)
    is_requested = change.stage is ChangeStage.REQUESTED
    missing = change.target - fleet.num_present
    keep = fleet.can_be_kept[: max(0, missing)] if is_requested else []
    surplus = len(fleet.staying) + len(keep) + len(fleet.starting) - change.target
    cancel = fleet.can_be_cancelled[::-1][: max(0, surplus)]
    surplus -= len(cancel)
    can_leave = surplus > 0 and len(cancel) == len(fleet.starting)
    leave = fleet.staying[-surplus:] if can_leave else []
    free = max(0, missing - len(keep))
    ranks = fleet.free_ranks(0 if fleet.is_reserved else free)
    waits = {rank: state.backoff.wait_s(rank, now) for rank in ranks}
    start = [rank for rank in ranks if not waits[rank]]
    if is_requested and (start or not free):
        change = replace(change, stage=ChangeStage.IN_PROGRESS)
    if change is not state.change:
        state = replace(state, change=change)
    return state, Plan(
        tuple(keep),
        tuple(cancel),
        tuple(leave),
        tuple(start),
        is_requested,
        min((wait_s for wait_s in waits.values() if wait_s), default=None),
    )


class StartFailure(msgspec.Struct, frozen=True):
    rank: int
    reason: str
    permanent: bool = False
    """The start would fail again in the same way."""


def on_joined(state: ControlState, ranks: Iterable[int]) -> ControlState:
    """Records that started engines now serve."""
    backoff, has_served = state.backoff, state.has_served
    for rank in ranks:
        backoff, has_served = backoff.started(rank), True
    return replace(state, backoff=backoff, has_served=has_served)


def on_failed(
    state: ControlState,
    fleet: FleetView,
    failure: StartFailure,
    now: float,
    *,
    is_requested: bool,
) -> ControlState:
    """Records that an engine did not start; others that started with it may still succeed. `fleet`
    does not contain it."""
    change, reason = state.change, failure.reason
    backoff = state.backoff.failed(failure.rank, now, reason, permanent=failure.permanent)
    state = replace(state, backoff=backoff)
    back = max(fleet.num_present, change.fallback)
    if not (is_requested and back < change.target):
        return state
    missed = change.missed or change.target
    change = replace(
        change,
        target=back,
        stage=ChangeStage.FAILED,
        error=f"the cluster could not grow to {missed} engines, and the target is {back} again: "
        f"{reason}",
        missed=missed,
    )
    return replace(state, change=change, backoff=Backoff())


def on_death(
    state: ControlState, rank: int, lived_s: float, now: float, reason: str
) -> ControlState:
    """Records that an engine which should have stayed died after it had served for `lived_s`."""
    return replace(state, backoff=state.backoff.died(rank, lived_s, now, reason))


def missing_engine(state: ControlState, fleet: FleetView, now: float) -> MissingEngine | None:
    """Why engines are missing; None: none is missing, or no start has failed."""
    if len(fleet.staying) >= state.change.target:
        return None
    return state.backoff.worst_missing_engine(fleet.serving, now)


def phase(state: ControlState, fleet: FleetView, now: float) -> str:
    """The phase as `/admin/cluster` reports it: idle, pending, prepare, commit, drain or failed. It
    is also failed while an exhausted rank waits for its next attempt."""
    if fleet.is_committing:
        return "commit"
    if fleet.starting and fleet.starting == fleet.pending:
        return "pending"
    if fleet.starting:
        return "prepare"
    if fleet.any_leaving:
        return "drain"
    found = missing_engine(state, fleet, now)
    if state.change.stage is ChangeStage.FAILED or (found is not None and found.exhausted):
        return "failed"
    missing = state.change.target - len(fleet.staying)
    return "idle" if not missing else "prepare" if missing > 0 else "drain"


def _settle(change: Change, fleet: FleetView) -> Change:
    target, stage = change.target, change.stage
    is_settled = stage is ChangeStage.SETTLED and change.fallback == target
    whole = len(fleet.staying) == target and not (
        fleet.is_committing or fleet.starting or fleet.any_leaving
    )
    if whole and not is_settled and stage is not ChangeStage.FAILED:
        return replace(change, stage=ChangeStage.SETTLED, fallback=change.target)
    return change


def _within(engines: int, limits: ClusterConfig) -> int:
    return min(max(limits.min_engines, engines), limits.max_engines)
