"""Bugs that the simulator must find: each replaces one method of the product with a wrong one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from swell.cluster.client.async_llm import AsyncLLM
from swell.cluster.client.engine_connection import EngineConnection
from swell.cluster.client.engine_core_client import AsyncEngineCoreClient
from swell.cluster.client.request_placer import RequestPlacer
from swell.cluster.client.requests.journey import Journey
from swell.cluster.client.requests.output_processor import OutputProcessor
from swell.cluster.client.requests.request_state import RequestState
from swell.cluster.client.routing.placement_queue import QueuedRequest
from swell.cluster.client.routing.routable_engines import RoutableEngines
from swell.cluster.client.routing.router import Router
from swell.cluster.control import cluster_status
from swell.cluster.control.engines import actor_names
from swell.cluster.control.engines.drain import Drain
from swell.cluster.control.engines.engine_handle import EngineHandle
from swell.cluster.control.engines.fleet import Fleet
from swell.cluster.control.engines.orphans import OrphanCollector
from swell.cluster.control.engines.roster_check import RosterCheck
from swell.cluster.control.manager import ClusterManager
from swell.cluster.control.plan import control_state, upgrade, upgrade_plan
from swell.cluster.control.plan.backoff import Backoff
from swell.cluster.control.plan.checkpoint import ClusterCheckpoint
from swell.cluster.control.plan.versions import UpgradeRecord, UpgradeStage
from swell.cluster.control.ray.checkpoint_store import CheckpointStore
from swell.cluster.control.ray.checkpoint_writer import CheckpointWriter
from swell.cluster.control.ray.coordinator_handle import CoordinatorHandle
from swell.coordinator import roster as rosters
from swell.coordinator.manager_state import ManagerState
from swell.coordinator.monitors.engine_monitor import EngineMonitor
from swell.coordinator.service import CoordinatorService
from swell.coordinator.state_machine import CoordinatorStateMachine
from swell.coordinator.subscribers import Subscribers
from swell.coordinator.transport.listening_clock import ListeningClock
from swell.coordinator.wave_protocol.waves import WaveCoordinator
from swell.engine.core import EngineCore
from swell.engine.executor.worker_memory import WorkerMemory
from swell.engine.serving.client_tracker import ClientTracker
from swell.engine.serving.coordinator_client import CoordinatorClient
from swell.engine.serving.engine_report import LoadReporter
from swell.engine.serving.server import EngineServer
from swell.engine.wire import AbortRequests, EngineCoreOutputs, KeepAliveReply
from tests.simulator.faults import FAULTS
from tests.simulator.laws.laws import judge
from tests.simulator.model import BROKEN_WEIGHTS
from tests.simulator.plants import shapes
from tests.simulator.scenario import Scenario, draw


@dataclass(frozen=True)
class Bug:
    """A bug: `wrong` replaces `owner.name`, and gets the correct method as its first argument."""

    owner: Any
    name: str
    wrong: Callable[..., Any]
    kinds: tuple[str, ...] = ()
    """The kinds of faults with which it is found soonest; empty: all."""
    shape: Callable[[Scenario], Scenario] = lambda scenario: scenario
    """Changes a scenario so that it can show the bug."""
    campaigns: bool = False
    """Whether ordinary draws, including campaigns, find it without `kinds` and `shape`."""

    @contextmanager
    def planted(self) -> Iterator[None]:
        right = getattr(self.owner, self.name)
        call = right.fget if isinstance(right, property) else right
        wrong = self.wrong

        def replaced(*args: Any, **kwargs: Any) -> Any:
            return wrong(call, *args, **kwargs)

        is_property = isinstance(right, property)
        setattr(self.owner, self.name, property(replaced) if is_property else replaced)
        try:
            yield
        finally:
            setattr(self.owner, self.name, right)


def _nothing(right: Any, *args: Any, **kwargs: Any) -> None: ...


def _no_reply(right: Any, self: Any, message: Any) -> None:
    if not isinstance(message, KeepAliveReply):
        right(self, message)


def _gap_ignored(right: Any, self: Any, message: Any) -> None:
    if isinstance(message, EngineCoreOutputs) and message.seq:
        self._last_seq = message.seq - 1
    if isinstance(message, KeepAliveReply):
        self._last_seq = message.seq
    right(self, message)


def _outputs_forgotten(right: Any, self: Any) -> Any:
    return msgspec.structs.replace(right(self), output_token_ids=[])


def _aborts_lost(right: Any, self: Any, engine: Any, message: Any) -> None:
    if not isinstance(message, AbortRequests):
        right(self, engine, message)


def _epoch_reset(right: Any, self: Any, epoch: int, hellos: Any, now: float) -> Any:
    self.advance_epoch = lambda epoch, now: None
    return right(self, 0, hellos, now)


def _all_orphans(right: Any, actors: Any, groups: Any, namespace: str, known: Any = ()) -> Any:
    serving = {name for name in known if name.startswith("coordinator")}
    return right(actors, groups, namespace, serving)


def _what_is_left(right: Any, state: Any, checkpoint: Any, **others: Any) -> Any:
    return right(state, msgspec.structs.replace(checkpoint, target=1), **others)


def _not_replaced(right: Any, state: Any, fleet: Any, now: float) -> Any:
    state, plan = right(state, fleet, now)
    if state.has_served and not plan.is_requested:
        plan = replace(plan, start=())
    return state, plan


def _load_forgotten(right: Any, self: Any) -> None:
    if self._report is not None:
        self._report = msgspec.structs.replace(self._report, running=0)
    self._engine = replace(self._engine, num_requests=lambda: 0)
    right(self)


def _pause_forgotten(right: Any, *args: Any, **others: Any) -> Any:
    return replace(right(*args, **others), pause_requested=False)


def _no_time_to_leave(
    right: Any, self: Any, rank: int, timeout_s: float, *, is_drain: bool = False
) -> None:
    right(self, rank, 0.0, is_drain=is_drain)


def _of_the_first(right: Any, self: Any) -> list[str]:
    """Uses the order of the connections' identities, which does not depend on the hash seed."""
    return sorted(self._versions[min(self._versions)]) if self._versions else []


def _any_state(right: Any, self: Any, state: Any) -> Any:
    self._state_machine.keep_manager_state(state)
    self._send_heartbeats()
    return state


def _leave_forgotten(right: Any, roster: Any, ranks: Any) -> Any:
    repaired = {*ranks} & {*roster.repairing}
    return rosters.update_members(roster, repaired, state=rosters.MemberState.ACTIVE)


async def _leads(right: Any, self: Any) -> bool:
    return True


def _kept_by_the_coordinator_only(right: Any, self: Any, rank: int) -> None:
    self.engines[rank].next_version = None
    self.tasks.spawn(self._coordinator.cancel_leave([rank]))


def _kept_unless_repaired(right: Any, roster: Any, ranks: Any) -> Any:
    kept = {*ranks} & {*roster.leaving}
    return rosters.update_members(roster, kept, state=rosters.MemberState.ACTIVE)


def _is_never_idle(right: Any, self: Any, report: Any, epoch: int) -> None:
    right(self, None, epoch)


async def _not_sent(right: Any, self: Any, ranks: Any) -> None: ...


def _falls_back_to_the_newest(right: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    after = right(state, *args, **kwargs)
    fallback = min(state.change.target, after.change.target)
    change = msgspec.structs.replace(after.change, fallback=fallback)
    return msgspec.structs.replace(after, change=change)


def _as_answered(right: Any, handle: Any, report: Any) -> Any:
    return right(handle, msgspec.structs.replace(report, workers=()))


async def _unsaved(right: Any, self: Any) -> None:
    if not self._checkpoints._saved.cluster_id:
        await right(self)


def _detached_all_the_same(right: Any, self: Any, ranks: Any, now: float) -> Any:
    detached = set(self.detached)
    sends = right(self, ranks, now)
    self.detached |= detached
    return sends


def _any_incarnation(right: Any, self: Any, ranks: Any, now: float, known: Any = None) -> Any:
    is_replaced = known is not None and any(
        (found := self.current_member(rank)) and found.incarnation not in known for rank in ranks
    )
    return right(self, ranks, now, None if is_replaced else known)


def _resumed_without_name(right: Any, self: Any, handle: Any, record: Any) -> None:
    right(self, handle, msgspec.structs.replace(record, is_named=False))


async def _never(right: Any, self: Any) -> None:
    await asyncio.sleep(1e9)


async def _not_kept(right: Any, self: RosterCheck, now: Any) -> None:
    """Compares the roster as if no engine left there that stays for the manager."""
    roster = now.view.roster
    staying = {
        rank
        for rank, handle in self._fleet.engines.items()
        if not handle.leaving and handle.find_in(roster)
    }
    view = msgspec.structs.replace(now.view, roster=rosters.cancel_leave(roster, staying))
    await right(self, msgspec.structs.replace(now, view=view))


async def _ended_only(right: Any, self: Fleet, handle: Any) -> None:
    try:
        if await self._may_end([handle]):
            await self._placement.end(handle)
    finally:
        del self.starting[handle.rank]
        self.on_change()


def _back_to_the_rejected(right: Any, record: UpgradeRecord) -> str:
    is_given_up = record.stage in (UpgradeStage.ROLLING_BACK, UpgradeStage.FAILED)
    return record.previous if is_given_up and record.previous in record.proven else right(record)


async def _claims_too(right: Any, self: CheckpointStore) -> ClusterCheckpoint:
    keys = await self._checkpoint_keys()
    others = [key for key in keys if not key.endswith(self._checkpoint)]
    found = await self._read_key(others[-1]) if others else None
    return found or await right(self)


async def _kept_of_its_term_ignored(right: Any, self: Any, kept: Any) -> Any:
    is_same = kept.term == (await self._store.read()).desired.term
    return await right(self, msgspec.structs.replace(kept, number=0) if is_same else kept)


def _hello_of_its_term_ignored(right: Any, self: Any, peer: bytes, hello: Any, now: float) -> None:
    is_same = hello.manager_state.desired.term == self._state_machine.manager_state.desired.term
    nothing = msgspec.structs.replace(hello, manager_state=ManagerState())
    right(self, peer, nothing if is_same else hello, now)


def _all_stay(
    right: Any, state: Any, fleet: Any, waiting: Any, needed: Any, done: Any, now: Any
) -> Any:
    return state, done


LOSSES = ("drop",)
PROCESSES = ("kill", "kill-control", "stop")

BUGS = {
    "ingress: a gap is not noticed": Bug(EngineConnection, "_on_message", _gap_ignored, LOSSES),
    "ingress: replies are not read": Bug(EngineConnection, "_on_message", _no_reply, LOSSES),
    "ingress: outputs are forgotten": Bug(
        RequestState, "engine_request", _outputs_forgotten, LOSSES
    ),
    "ingress: aborts are lost": Bug(AsyncEngineCoreClient, "send", _aborts_lost, LOSSES),
    "ingress: unreachable engines are ready": Bug(
        AsyncLLM, "on_unreachable", _nothing, ("cut", "half-cut")
    ),
    "ingress: lost engines keep requests": Bug(RequestPlacer, "migrate_all", _nothing, PROCESSES),
    "ingress: a journey has no end": Bug(Journey, "finish", _nothing),
    "ingress: outputs of an earlier attempt count": Bug(
        OutputProcessor,
        "find",
        lambda right, self, request_id, attempt: self.request_states.get(request_id),
        shape=shapes.crowd,
    ),
    "ingress: engines that are not reached get requests": Bug(
        Router, "set_unreachable", _nothing, ("cut", "half-cut")
    ),
    "ingress: who waits for a silent coordinator gets requests": Bug(
        AsyncEngineCoreClient, "_fault", _nothing, shape=shapes.silent_coordinator
    ),
    "engine: lost clients keep requests": Bug(
        EngineCore, "abort_client", lambda right, self, client: [], LOSSES
    ),
    "engine: it does not say what it computes": Bug(EngineServer, "_send_started", _nothing),
    "engine: aborts are ignored": Bug(EngineCore, "abort_requests", _nothing, LOSSES),
    "engine: silent clients are kept": Bug(
        ClientTracker, "drop_silent", lambda right, self: [], ("kill-ingress",)
    ),
    "engine: a heartbeat reports no load": Bug(
        CoordinatorClient, "_send_heartbeat", _load_forgotten, ("hang",)
    ),
    "coordinator: epochs begin anew": Bug(
        CoordinatorStateMachine, "recover", _epoch_reset, ("kill-control", "kill")
    ),
    "coordinator: nobody stalls": Bug(
        EngineMonitor, "check", lambda right, *args: [], ("stop", "hang", "cut")
    ),
    "coordinator: a new ingress gets no view": Bug(
        CoordinatorService, "_on_subscribe", _nothing, PROCESSES
    ),
    "coordinator: an engine that is kept goes on leaving": Bug(
        CoordinatorStateMachine,
        "cancel_leave",
        lambda right, self, ranks, now: [],
        shape=shapes.kept,
    ),
    "manager: a drain is over at once": Bug(Fleet, "leave", _no_time_to_leave),
    "manager: what it placed is an orphan": Bug(
        actor_names, "find_orphans", _all_orphans, PROCESSES
    ),
    "manager: what is left is the target": Bug(
        control_state, "take_over", _what_is_left, PROCESSES
    ),
    "manager: the dead are not replaced": Bug(control_state, "plan", _not_replaced, PROCESSES),
    "manager: a death is not noticed": Bug(Fleet, "_watch", _nothing, ("kill",)),
    "manager: what could not be ended is left": Bug(
        OrphanCollector, "collect_forever", _never, ("gcs-away", "kill")
    ),
    "manager: a pause is forgotten": Bug(
        control_state, "take_over", _pause_forgotten, ("kill", "kill-control")
    ),
    "manager: an engine that is kept goes on leaving": Bug(
        CoordinatorHandle, "cancel_leave", _not_sent, LOSSES, shapes.kept
    ),
    "ingress: an answer continues on any version": Bug(
        RoutableEngines,
        "of_version",
        lambda right, self, version: self.active,
        shape=shapes.upgrading(1),
    ),
    "ingress: what it needs is not said": Bug(
        AsyncLLM, "versions_in_use", lambda right, self: [], shape=shapes.upgrading(1)
    ),
    "manager: a version that is needed is not made again": Bug(
        upgrade_plan, "unmet", lambda right, *args: [], shape=shapes.upgrading(1)
    ),
    "manager: nothing gives way to a version that is needed": Bug(
        upgrade_plan, "_give_way", _all_stay, shape=shapes.tight
    ),
    "manager: a version that does not load is not rolled back": Bug(
        upgrade,
        "_roll_back",
        lambda right, state, reason: state,
        shape=shapes.upgrading(BROKEN_WEIGHTS),
    ),
    "engine: it keeps its weights": Bug(
        WorkerMemory, "update_weights", _nothing, shape=shapes.updating
    ),
    "manager: an engine that gets weights is forgotten": Bug(
        Fleet, "_reload", _nothing, shape=shapes.updating
    ),
    "coordinator: who was asked to leave counts as lost": Bug(
        rosters,
        "detach",
        lambda right, roster, ranks: rosters.remove(roster, ranks),
        campaigns=True,
    ),
    "coordinator: it knows the versions of one ingress only": Bug(
        Subscribers, "versions", _of_the_first, campaigns=True
    ),
    "coordinator: a recovery begins no epoch": Bug(
        CoordinatorStateMachine,
        "recover",
        lambda right, self, epoch, hellos, now: right(self, epoch - 1, hellos, now),
        campaigns=True,
    ),
    "coordinator: whose repair is not heard of stays out": Bug(
        CoordinatorStateMachine,
        "_check_repairs",
        lambda right, *args: [],
        ("lose-worker", "black-hole", "drop"),
        campaigns=True,
    ),
    "coordinator: time in which it was stopped counts as silence": Bug(
        ListeningClock,
        "read",
        lambda right, self, now: self._listened_s + now - (self._last or now),
        campaigns=True,
    ),
    "coordinator: a message of an earlier engine counts as one of its successor": Bug(
        rosters.Roster,
        "find",
        lambda right, self, rank, _=None: right(self, rank),
        ("black-hole", "kill", "half-cut-pair"),
        campaigns=True,
    ),
    "coordinator: an engine that comes late has the epoch of the others": Bug(
        WaveCoordinator, "introduced", lambda right, *args: [], shape=shapes.half_cut_group
    ),
    "coordinator: it keeps any state of a manager": Bug(
        CoordinatorService, "_keep", _any_state, campaigns=True
    ),
    "coordinator: an engine that is repaired leaves no longer": Bug(
        rosters, "end_repair", _leave_forgotten, campaigns=True
    ),
    "manager: a start that is cancelled goes on": Bug(
        Fleet, "cancel_start", _nothing, campaigns=True
    ),
    "ingress: it does not hear what engines begin": Bug(
        OutputProcessor, "process_started", _nothing, campaigns=True
    ),
    "engine: a change of its load is none": Bug(LoadReporter, "changed", _nothing, campaigns=True),
    "manager: a start that failed counts for ever": Bug(
        Backoff, "started", lambda right, self, rank: self, campaigns=True
    ),
    "manager: one that was replaced leads on": Bug(
        CheckpointWriter, "is_leader", _leads, campaigns=True
    ),
    "coordinator: an engine that is kept while it is repaired leaves": Bug(
        rosters, "cancel_leave", _kept_unless_repaired, campaigns=True
    ),
    "coordinator: an ingress that is gone stays subscribed": Bug(
        Subscribers, "forget_silent", _nothing, campaigns=True
    ),
    "manager: an engine that is kept leaves again": Bug(
        Fleet, "keep", _kept_by_the_coordinator_only, campaigns=True
    ),
    "manager: an engine whose host stays moves on": Bug(
        Fleet, "stay", _nothing, ("drain-host",), campaigns=True
    ),
    "manager: an idle engine does not leave": Bug(
        EngineHandle, "on_poll", _is_never_idle, campaigns=True
    ),
    "ingress: it ignores that a client gives up": Bug(AsyncLLM, "abort", _nothing, campaigns=True),
    "ingress: a request waits for an engine without limit": Bug(
        QueuedRequest, "fail_after", _nothing, campaigns=True
    ),
    "manager: the status has workers that were replaced": Bug(
        cluster_status, "_workers", _as_answered, campaigns=True
    ),
    "manager: a growth that fails returns to a size that was never reached": Bug(
        control_state, "scale", _falls_back_to_the_newest, campaigns=True
    ),
    "manager: requests are not saved": Bug(ClusterManager, "save", _unsaved, campaigns=True),
    "coordinator: an engine that is kept is detached": Bug(
        CoordinatorStateMachine,
        "cancel_leave",
        _detached_all_the_same,
        shape=shapes.kept_by_a_successor,
    ),
    "coordinator: a dead engine takes its successor along": Bug(
        CoordinatorStateMachine, "remove_failed", _any_incarnation, shape=shapes.slow_removal
    ),
    "manager: a version in use is forgotten": Bug(
        upgrade,
        "_want",
        lambda right, state, config_hash, config, in_use, base="": right(
            state, config_hash, config, (), base
        ),
        campaigns=True,
    ),
    "manager: its successor does not know that a drain is by name": Bug(
        Drain, "resume", _resumed_without_name, campaigns=True
    ),
    "manager: an engine that leaves by mistake is not kept": Bug(
        RosterCheck, "compare", _not_kept, campaigns=True
    ),
    "manager: an engine whose start is cancelled stays in the roster": Bug(
        Fleet, "_discard", _ended_only, campaigns=True
    ),
    "manager: its successor does not know the drains": Bug(
        Fleet, "inherit", _nothing, campaigns=True
    ),
    "manager: a change that fails returns to a version that was given up": Bug(
        upgrade, "_fallback", _back_to_the_rejected, campaigns=True
    ),
    "manager: it takes the claim of a lost manager for its state": Bug(
        CheckpointStore, "read", _claims_too, campaigns=True
    ),
    "manager: what is kept and could not be stored is ignored": Bug(
        CheckpointWriter, "take_over", _kept_of_its_term_ignored, campaigns=True
    ),
    "coordinator: it ignores what an engine keeps of the same term": Bug(
        CoordinatorService, "_on_hello", _hello_of_its_term_ignored, campaigns=True
    ),
}


def find(bug: Bug, seeds: range) -> int | None:
    """Returns the first seed with which this bug breaks a law, or None. A seed that breaks one
    without the bug does not count."""
    for seed in seeds:
        kinds = bug.kinds or tuple(FAULTS)
        scenario = bug.shape(draw(seed, kinds, campaigns=bug.campaigns))
        with bug.planted():
            is_broken = bool(judge(scenario).broken)
        if is_broken and not judge(scenario).broken:
            return seed
    return None
