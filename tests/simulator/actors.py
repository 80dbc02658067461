"""Simulated actors: what the actors of a real cluster do around the coordinator, engines and
manager."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Container, Coroutine, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from swell.cluster.control.engines.engine_handle import EngineHandle
from swell.cluster.control.engines.placement import Placement
from swell.cluster.control.manager import ClusterManager
from swell.cluster.control.plan.control_state import ChangeStage, ControlState
from swell.cluster.control.ray.actor_errors import ActorError
from swell.cluster.control.ray.checkpoint_store import CheckpointStore
from swell.cluster.control.ray.checkpoint_writer import CheckpointWriter
from swell.cluster.control.ray.coordinator_handle import CoordinatorHandle
from swell.configs.schema import ClusterConfig, Config
from swell.coordinator.manager_state import NO_MANAGER, ManagerId, ManagerState, NotLeading
from swell.coordinator.roster import Member, Roster
from swell.coordinator.service import CoordinatorService
from swell.coordinator.transport.coordinator_contact import CoordinatorContact, CoordinatorEndpoint
from swell.coordinator.transport.finder import FindCoordinator
from swell.coordinator.wave_protocol.wave_interface import GroupState, RankedCommands
from swell.coordinator.wire import ClusterView, EngineHello
from swell.engine.core import EngineCore
from swell.engine.executor import ExecutorError
from swell.engine.serving.actor_results import EngineReady, NewWeightsRefused, StartStatus
from swell.engine.serving.server import EngineServer
from swell.engine.wire import EngineMessage, ReplaceClient
from tests.simulator.kernel.kernel import WORLD
from tests.simulator.kernel.process import Process
from tests.simulator.kernel.runtime import SimRuntime
from tests.simulator.model import BROKEN_WEIGHTS, SimExecutor, folder_of, weights_in
from tests.simulator.simulated_ray.ray_interface import SimRay

if TYPE_CHECKING:
    from tests.simulator.control_plane import ControlPlane

_UNHEALTHY_S = 30.0
"""Serve checks the health of a replica every ten seconds, and kills it after three failed
checks."""
NAMESPACE, CLUSTER_ID = "sim", "0" * 12


def config_hash(weights: int) -> str:
    """Returns the hash of the configuration with these weights."""
    return f"{weights:012x}"


def weights_of(version: str) -> int:
    return int(version.partition("-")[2], 16)


def with_weights(config: Config, weights: int) -> Config:
    model = msgspec.structs.replace(config.model, path=folder_of(weights))
    return msgspec.structs.replace(config, model=model)


Done = Callable[[Any], None]


class SimCoordinator(CoordinatorService):
    """Simulates `coordinator/actor.py`. Its calls return what a caller awaits."""

    runtime_class: type[SimRuntime] = SimRuntime

    def __init__(
        self,
        plane: ControlPlane,
        process: Process,
        restarted: bool,
        config: ClusterConfig,
        lockstep: bool,
        endpoint: CoordinatorEndpoint,
        inherited: bool,
    ) -> None:
        self._plane, self._pid = plane, plane.ray.pid_of(process)
        super().__init__(
            config,
            self.runtime_class(process, plane.net),
            lockstep=lockstep,
            endpoint=endpoint.on_host(process.host),
            recover=inherited or restarted,
        )
        plane.coordinators.append((process, self))
        self._kept: frozenset[int] = frozenset()
        """Ranks that a call in progress keeps although they were leaving."""
        self._observe_state_machine()

    def _observe_state_machine(self) -> None:
        plane, machine = self._plane, self._state_machine
        detach, cancel_leave, join = machine.detach, machine.cancel_leave, machine.join
        change = machine.publisher.change

        def observed_detach(ranks: Iterable[int], now: float) -> RankedCommands:
            for call in plane.on_detach:
                call(list(ranks))
            return detach(ranks, now)

        def observed_cancel(ranks: Iterable[int], now: float) -> RankedCommands:
            self._kept = frozenset(ranks)
            try:
                sends = cancel_leave(ranks, now)
            finally:
                self._kept = frozenset()
            for call in plane.on_keep:
                call(list(ranks))
            return sends

        def observed_change(step: Callable[[Roster], Roster], now: float) -> Roster:
            before = machine.roster
            after = change(step, now)
            for call in plane.on_roster if after is not before else ():
                call(before, after, self._kept)
            return after

        def observed_join(
            members: Iterable[Member],
            now: float,
            unheard: Container[int] = (),
            earlier: Container[int] = (),
        ) -> RankedCommands:
            newcomers = list(members)
            try:
                return join(newcomers, now, unheard, earlier)
            except ValueError as error:
                for call in plane.on_refused:
                    call(newcomers, str(error))
                raise

        machine.join = observed_join  # type: ignore[method-assign]
        machine.detach = observed_detach  # type: ignore[method-assign]
        machine.cancel_leave = observed_cancel  # type: ignore[method-assign]
        machine.publisher.change = observed_change  # type: ignore[method-assign]

    @property
    def machine_view(self) -> ClusterView:
        """The current view of its state machine."""
        return self._state_machine.view()

    @property
    def epoch(self) -> int:
        return self._state_machine.roster.epoch

    @property
    def group_ranks(self) -> tuple[int, ...]:
        """The ranks of the engines that step together, or form a group to do so."""
        waves = self._state_machine.waves
        return waves.ranks if waves.lockstep else ()

    @property
    def group_state(self) -> GroupState:
        return self._state_machine.waves.group_state

    @property
    def members(self) -> tuple[Member, ...]:
        return self._state_machine.roster.members

    def leave(self, ranks: list[int], by: ManagerId = NO_MANAGER) -> Roster:
        for call in self._plane.on_leave:
            call(ranks)
        return super().leave(ranks, by)

    def _change_for(self, by: ManagerId, step: Callable[[float], RankedCommands]) -> Roster:
        state = self._state_machine.manager_state
        roster = super()._change_for(by, step)
        for call in self._plane.on_command:
            call(by, state)
        return roster

    def _on_hello(self, peer: bytes, hello: EngineHello, now: float) -> None:
        super()._on_hello(peer, hello, now)
        for call in self._plane.on_hello:
            call(self, hello)

    def _keep(self, state: ManagerState) -> ManagerState:
        before = self._state_machine.manager_state
        kept = super()._keep(state)
        for call in self._plane.on_kept:
            call(self, before, self._state_machine.manager_state)
        return kept

    def contact(self) -> CoordinatorContact:
        name = f"coordinator-{CLUSTER_ID}"
        return CoordinatorContact(self.address, self.keys, self._pid, name, NAMESPACE)


def finder(plane: ControlPlane, process: Process, known: CoordinatorContact) -> FindCoordinator:
    """Returns a function like `find` in `coordinator/actor.py`."""
    ray = SimRay(plane.ray, process)

    async def find() -> CoordinatorContact | None:
        with contextlib.suppress(TimeoutError, ActorError):
            async with asyncio.timeout(plane.config.cluster.stall_timeout_s):
                actor = await ray.find_actor(known.name, known.namespace)
                if actor is not None:
                    contact: CoordinatorContact = await ray.call(actor, "contact")
                    return contact
        return None

    return find


class SimEngine:
    """Simulates `engine/serving/actor.py`."""

    def __init__(
        self,
        plane: ControlPlane,
        process: Process,
        _restarted: bool,
        config: Config,
        rank: int,
        version: str,
    ) -> None:
        self._plane, self.process, self.rank = plane, process, rank
        self.current_version = version
        """The version that it runs, or is about to run."""
        self._task: asyncio.Task[None] | None = None
        self._config = config
        is_later = len(plane.engines) >= plane.scenario.engines
        self._load_s = 0.2 + plane.load_times.random() + is_later * plane.scenario.slow_load_s
        self._loading = asyncio.Lock()
        self.stopped_at: float | None = None
        """The time at which a manager stopped the engine. Ray kills its process later."""
        self._manager = NO_MANAGER
        self._ended, self._served = asyncio.Event(), asyncio.Event()
        self.executor = SimExecutor(
            process,
            plane.scenario.step_s,
            plane.groups if config.parallel.expert else None,
            weights_in(config.model.path),
        )
        self.executor.on_poison = partial(self._call_all, plane.on_poison)
        self.server: EngineServer | None = None
        self.cannot_load = False
        plane.engines.append(self)

    def _call_all(self, calls: list[Callable[[Process], None]]) -> None:
        for call in calls:
            call(self.process)

    async def start(
        self, _group: Any, config: Config, version: str, coordinator: CoordinatorContact
    ) -> EngineReady:
        self._coordinator = coordinator
        async with self._loading:
            self._check_not_ended()
            if self.server is None:
                await asyncio.sleep(self._load_s)
                if weights_in(self._config.model.path) == BROKEN_WEIGHTS:
                    self.cannot_load = True
                    raise ValueError("the weights are broken")
                runtime = SimRuntime(self.process, self._plane.net)
                limits = self.executor.start()
                self._serve(EngineCore(self._config, self.executor, limits, runtime.now))
            elif version != self.current_version:
                await self._reload(config, version)
        return self.ready()

    async def _reload(self, config: Config, version: str) -> None:
        server, self.server = self.server, None
        assert server is not None and self._task is not None
        own, self.current_version = self.current_version, version
        server.stop(keeps_core=True)
        await asyncio.wait([self._task], timeout=self._config.cluster.stall_timeout_s)
        if not self._task.done():
            self.process.kill()
        await asyncio.sleep(self._load_s)
        refusal: ValueError | None = None
        try:
            server.core.reload(config.model.path)
            self._config = config
        except ValueError as error:
            refusal, self.current_version = error, own
        except ExecutorError:
            self.process.kill()
            raise
        self._serve(server.core)
        if refusal is not None:
            raise NewWeightsRefused(str(refusal))

    def _serve(self, core: EngineCore) -> None:
        self._check_not_ended()
        runtime = SimRuntime(self.process, self._plane.net)
        self.server = EngineServer(
            self._config,
            self.rank,
            core,
            self._coordinator.keys,
            self._coordinator.address,
            runtime,
            finder(self._plane, self.process, self._coordinator),
            version=self.current_version,
        )
        self._observe_messages(self.server)
        self._served = asyncio.Event()
        self._task = self.process.loop.create_task(self.server.serve(), name="engine")
        self._task.add_done_callback(partial(self._on_end, self.server, self._served))

    def _observe_messages(self, server: EngineServer) -> None:
        handle = server._on_message

        def observed_message(peer: bytes, message: EngineMessage) -> None:
            handle(peer, message)
            if isinstance(message, ReplaceClient):
                for call in self._plane.on_replace:
                    call(server, message.identities)

        server._on_message = observed_message  # type: ignore[method-assign]

    def _on_end(
        self, server: EngineServer, served: asyncio.Event, task: asyncio.Task[None]
    ) -> None:
        if not server.keeps_core:
            self._ended.set()
        served.set()
        if not task.cancelled() and task.exception() is not None:
            self.process.fail("engine", task.exception())  # type: ignore[arg-type]

    def adopt(self, by: ManagerId) -> str:
        self._check_not_ended()
        self._manager = max(self._manager, by, key=lambda manager: manager.term)
        return self.current_version

    def _check_not_ended(self) -> None:
        if self.stopped_at is not None or self._ended.is_set():
            raise RuntimeError("it has terminated")

    @property
    def has_work(self) -> bool:
        """Whether the engine has requests, even unread ones, or must step with its peers."""
        return self.server is not None and self.server.core.has_work

    def ready(self) -> EngineReady:
        if self.server is None:
            raise RuntimeError("it loads")
        server = self.server
        return EngineReady(
            self.rank,
            server.address,
            server.core.limits,
            self._plane.ray.pid_of(self.process),
            self.process.host,
            server.workers,
            server.incarnation,
            server.member.store,
            server.version,
        )

    def status(self) -> StartStatus:
        return StartStatus("loading" if self.server is None else "serving")

    async def ended(self, timeout_s: float) -> str | None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._served.wait()
        except TimeoutError:
            return None
        return "it was stopped" if self._ended.is_set() else None

    async def stop(self, by: ManagerId) -> None:
        if by.term < self._manager.term:
            raise NotLeading(f"engine {self.rank} has been adopted by a later manager")
        self.stopped_at = self.process.kernel.now
        if self.server is not None:
            self.server.stop()
            await self._ended.wait()


class ObservedManager(ClusterManager):
    """Reports the target to which it falls back when a requested change fails, the target of a
    request that it accepts, that it is about to make a plan, a decrease of the target, engines that
    it is about to start, and that it has lost leadership."""

    on_failed_change: Done
    on_begin: Done
    on_reconcile: Callable[[], None]
    on_shrink: Callable[[], None]
    on_grow: Callable[[list[str]], None]
    on_deposed: Callable[[], None]

    async def _step_down(self) -> None:
        self.on_deposed()
        await super()._step_down()

    async def _grow(self, handles: list[EngineHandle], *, is_requested: bool) -> None:
        self.on_grow([handle.name for handle in handles])
        await super()._grow(handles, is_requested=is_requested)

    def _begin(self, state: ControlState) -> None:
        self.on_begin(state.change.target)
        if state.change.target < self.target:
            self.on_shrink()
        super()._begin(state)

    def _reconcile(self) -> float | None:
        self.on_reconcile()
        return super()._reconcile()

    def _on_failed(self, handle: EngineHandle, error: Exception, *, is_requested: bool) -> None:
        super()._on_failed(handle, error, is_requested=is_requested)
        if is_requested and self._state.change.stage is ChangeStage.FAILED:
            self.on_failed_change(self.target)


class SimManager:
    """Simulates `ManagerDeployment` in `cluster/app.py`, which Serve restarts when it dies."""

    def __init__(self, plane: ControlPlane, process: Process) -> None:
        self._plane, self.process = plane, process
        ray, runtime = SimRay(plane.ray, process), SimRuntime(process, plane.net)
        checkpoints = CheckpointStore(NAMESPACE, CLUSTER_ID, ray)
        config = with_weights(plane.config, plane.deployed)
        writer = CheckpointWriter(checkpoints, config, runtime)
        self._coordinator = CoordinatorHandle(
            plane.config, NAMESPACE, checkpoints, ray, writer.manager_id
        )
        placement = Placement(
            plane.config, NAMESPACE, self._coordinator, ray, runtime, writer.confirm_leader
        )
        self.manager = ObservedManager(
            config,
            self._coordinator,
            placement,
            writer,
            runtime,
            config_hash(plane.deployed),
        )
        self.manager.on_failed_change = self._on_failed_change
        self.manager.on_begin = self._on_begin
        self.manager.on_reconcile = self._on_reconcile
        self.manager.on_shrink = plane.operator.on_shrink
        self.manager.on_grow = self._on_grow
        self.manager.on_deposed = self._on_deposed
        self._observe_keep()
        self.has_started = False
        process.loop.create_task(self._start(), name="manager")

    def _observe_keep(self) -> None:
        cancel_leave = self._coordinator.cancel_leave

        def observed_cancel(ranks: list[int]) -> Coroutine[Any, Any, None]:
            for call in self._plane.on_decided_keep:
                call(self, ranks)
            return cancel_leave(ranks)

        self._coordinator.cancel_leave = observed_cancel  # type: ignore[method-assign]

    @property
    def contact(self) -> CoordinatorContact | None:
        return self._coordinator.contact

    async def _start(self) -> None:
        """Starts the manager. If that raises, Serve would kill the replica and start another
        one."""
        try:
            await self.manager.start()
        except Exception:
            self.process.kill()
            return
        self.has_started = True

    def _on_begin(self, target: int) -> None:
        for call in self._plane.on_begin:
            call(self, target)

    def _on_reconcile(self) -> None:
        for call in self._plane.on_reconcile:
            call(self)

    def _on_failed_change(self, target: int) -> None:
        self._plane.operator.on_failed_change(target)
        for call in self._plane.on_failed_change:
            call(self, target)

    def _on_grow(self, names: list[str]) -> None:
        for call in self._plane.on_grow:
            call(self, names)

    def _on_deposed(self) -> None:
        """Kills the process after the time in which Serve notices that it is unhealthy."""
        kernel = self.process.kernel
        kernel.at(kernel.now + _UNHEALTHY_S, WORLD, self.process.kill)

    def do(self, call: str, args: tuple[Any, ...], on_begun: Done, on_end: Done) -> None:
        """Sends a request of an operator, which is accepted when it is saved. `on_begun` gets the
        target when it is in the manager's state; `on_end` gets an exception, or the target."""

        async def run() -> None:
            for observe in self._plane.on_request:
                observe(self, call)
            try:
                if call == "update_weights":
                    result: Any = self.manager.upgrade(*args, in_place=True)
                else:
                    result = getattr(self.manager, call)(*args)
                if call in (
                    "scale",
                    "upgrade",
                    "update_weights",
                ):  # it starts after the manager has checked that there is room
                    await result
                on_begun(self.manager.target)
                if call in ("pause", "resume"):
                    await result
                await self.manager.save()
            except Exception as error:
                for answered in self._plane.on_answer:
                    answered(self, call, error)
                on_end(error)
            else:
                for answered in self._plane.on_answer:
                    answered(self, call, None)
                on_end(self.manager.target)

        loop = self.process.loop
        self.process.kernel.soon(self.process, lambda: loop.create_task(run(), name=call))
