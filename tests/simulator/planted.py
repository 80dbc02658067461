"""Bugs that the simulator must find: each replaces one method of the product by a wrong one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from swell.cluster.client.async_llm import AsyncLLM
from swell.cluster.client.engine_connection import EngineConnection
from swell.cluster.client.engine_core_client import AsyncEngineCoreClient
from swell.cluster.client.request_placer import RequestPlacer
from swell.cluster.client.request_state import RequestState
from swell.cluster.control import actor_names, control_state
from swell.cluster.control.fleet import Fleet
from swell.cluster.control.manager import ClusterManager
from swell.coordinator.engine_monitor import EngineMonitor
from swell.coordinator.service import CoordinatorService
from swell.coordinator.state_machine import CoordinatorStateMachine
from swell.engine.client_tracker import ClientTracker
from swell.engine.coordinator_client import CoordinatorClient
from swell.engine.core import EngineCore
from swell.engine.wire import AbortRequests, EngineCoreOutputs, KeepAliveReply
from tests.simulator.faults import FAULTS
from tests.simulator.laws import judge
from tests.simulator.scenario import draw


@dataclass(frozen=True)
class Bug:
    """`owner.name` becomes `wrong`, which gets the right one as its first argument."""

    owner: Any
    name: str
    wrong: Callable[..., Any]
    kinds: tuple[str, ...] = ()
    """Faults among which it is found soonest; none: all."""

    @contextmanager
    def planted(self) -> Iterator[None]:
        right = getattr(self.owner, self.name)
        wrong = self.wrong

        def replaced(*args: Any, **kwargs: Any) -> Any:
            return wrong(right, *args, **kwargs)

        setattr(self.owner, self.name, replaced)
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


def _all_strays(right: Any, actors: Any, groups: Any, namespace: str, known: Any = ()) -> Any:
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
    self._num_requests = lambda: 0
    right(self)


async def _unsaved(right: Any, self: Any) -> None: ...


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
        AsyncLLM, "_on_unreachable", _nothing, ("cut", "half-cut")
    ),
    "ingress: lost engines keep requests": Bug(RequestPlacer, "migrate_all", _nothing, PROCESSES),
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
    "manager: what it placed is a stray": Bug(actor_names, "find_strays", _all_strays, PROCESSES),
    "manager: what is left is the target": Bug(
        control_state, "take_over", _what_is_left, PROCESSES
    ),
    "manager: the dead are not replaced": Bug(control_state, "plan", _not_replaced, PROCESSES),
    "manager: a death is not noticed": Bug(Fleet, "_watch", _nothing, PROCESSES),
    "manager: requests are not saved": Bug(ClusterManager, "save", _unsaved, PROCESSES),
}


def find(bug: Bug, seeds: range) -> int | None:
    """The first seed that breaks a law with this bug; None: none does."""
    for seed in seeds:
        scenario = draw(seed, bug.kinds or tuple(FAULTS))
        with bug.planted():
            if judge(scenario).broken:
                return seed
    return None
