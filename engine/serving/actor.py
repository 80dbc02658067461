"""An engine as a Ray actor: it creates the workers and runs the server's loop in a thread."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import placement_group_table

from swell.configs.runtime import process
from swell.configs.runtime.flight_recorder import recorder
from swell.configs.runtime.gpus import VISIBLE_GPUS, gpu_indices
from swell.configs.runtime.log import StructuredLogger, configure_logging
from swell.configs.runtime.network import host_address, other_ports
from swell.configs.runtime.process import freeze_gc
from swell.configs.schema import Config
from swell.coordinator.actor import find
from swell.coordinator.manager_state import NO_MANAGER, ManagerId, NotLeading
from swell.coordinator.transport.coordinator_contact import CoordinatorContact
from swell.coordinator.transport.runtime import ThreadRuntime
from swell.engine.core import EngineCore
from swell.engine.executor import Executor, build_executor
from swell.engine.executor.host_shares import workers_by_node
from swell.engine.serving.actor_results import EngineReady, NewWeightsRefused, StartStatus
from swell.engine.serving.server import EngineServer
from swell.engine.serving.start_timeline import StartPhase, StartTimeline

_EXIT_GRACE_S = 10.0
"""For how long the actor of a failed engine still answers `ended`; then its process exits."""


_FIRST_PHASE = "preparing the engine"
_LOADING, _WATCHING = "loading", "watching"
_STARTING = "starting"
"""Concurrency groups of the calls that wait for long. Ray does not cancel the calls of a manager
that has terminated, so several of them may wait at once. They must not occupy the threads of the
calls that every manager expects to be answered soon, or it takes the engine for a hanging one."""


@ray.remote(
    num_cpus=0,
    max_concurrency=4,
    max_restarts=0,
    concurrency_groups={_LOADING: 4, _WATCHING: 4},
)
class EngineActor:
    """One engine. `start` loads the model, starts to serve and returns `EngineReady`; `ended` waits
    until the engine has stopped."""

    _coordinator: CoordinatorContact

    def __init__(self, config: Config, rank: int, version: str = "") -> None:
        """`version`: that of the configuration, as the roster lists it."""
        configure_logging()
        recorder().publish(secrets.token_hex(16), "engine")  # workers that are processes join later
        self._log = StructuredLogger("engine", rank=rank)
        self._config = config
        self._rank = rank
        self._version = version
        self._executor: Executor | None = None
        self._server: EngineServer | None = None
        self._thread: threading.Thread | None = None
        self._loading = threading.Lock()
        self._timeline = StartTimeline(_FIRST_PHASE, time.monotonic)
        self._start: list[StartPhase] = []
        """The phases of the start, when it has finished."""
        self._stopping = False
        self._manager = NO_MANAGER
        self._manager_lock = threading.Lock()
        """Held while `_manager` is set, and while a stop of an earlier manager is refused."""
        self._end = "it was stopped"
        self._ended = threading.Event()
        self._served = threading.Event()
        """Set when the serving engine has stopped, or gets other weights; replaced for the next
        one."""

    @ray.method(concurrency_group=_LOADING)  # type: ignore[untyped-decorator]
    def start(
        self, placement_group: Any, config: Config, version: str, coordinator: CoordinatorContact
    ) -> EngineReady:
        """Loads the model and opens the channel. The engine then follows the coordinator of the
        newest call: a call during loading may name one that has moved meanwhile. Raises the
        exception of a worker or of the configuration.

        A call during or after loading returns the same result: a manager that adopts an engine
        during its start calls it again. A call with another version, which may differ only in its
        weights, turns this actor into another engine with the same processes. Raises
        NewWeightsRefused if the weights cannot be used; then the new engine has the previous
        version.
        """
        self._coordinator = coordinator
        with self._loading:
            self._check_not_ended()
            if self._server is None:
                self._timeline = StartTimeline(_FIRST_PHASE, time.monotonic)
                self._load(placement_group)
            elif version != self._version:
                self._reload(config, version)
        return self.ready()

    def _load(self, placement_group: Any) -> None:
        cluster = self._config.cluster
        self._host = host_address(cluster.interface, ray.util.get_node_ip_address())
        shares = _workers_by_node(self._config)
        self._executor = executor = build_executor(
            self._config,
            placement_group=placement_group,
            keys=self._coordinator.keys,
            host=self._host,
            workers_by_node=shares,
            workers_per_machine=shares[ray.get_runtime_context().get_node_id()],
            gpus=gpu_indices(ray.get_gpu_ids(), os.environ.get(VISIBLE_GPUS)),
        )
        limits = executor.start(self._timeline.enter)
        self._serve(EngineCore(self._config, executor, limits))
        freeze_gc()

    def _reload(self, config: Config, version: str) -> None:
        """Turns the actor into another engine, after this one has left its cluster. A client that
        has not noticed reaches nothing at the old address. Any failure but refused weights exits
        the process."""
        server, self._server = self._server, None
        assert server is not None
        own, self._version = self._version, version
        reading = f"reading the weights of {config.model.path}"
        self._timeline = StartTimeline(reading, time.monotonic)
        refusal: ValueError | None = None
        try:
            self._end_server(server)
            try:
                server.core.reload(config.model.path)
                self._config = config
            except ValueError as error:
                refusal, self._version = error, own
            self._serve(server.core)
        except BaseException as error:
            self._fail(error)
            raise
        if refusal is not None:
            raise NewWeightsRefused(str(refusal))

    def _end_server(self, server: EngineServer) -> None:
        """Stops the server and keeps its core. Raises RuntimeError if its loop has failed, or hangs
        in a step."""
        assert self._thread is not None
        server.stop(keeps_core=True)
        self._thread.join(self._config.cluster.stall_timeout_s)
        if self._thread.is_alive():
            raise RuntimeError("its last step did not finish within cluster.stall_timeout_s")
        if self._ended.is_set():
            raise RuntimeError(f"it has terminated: {self._end}")

    def _serve(self, core: EngineCore) -> None:
        """Starts the server. Raises RuntimeError if the engine was stopped while it loaded."""
        if self._stopping:
            core.shutdown()
        self._check_not_ended()
        cluster, host = self._config.cluster, self._host
        self._server = EngineServer(
            self._config,
            self._rank,
            core,
            self._coordinator.keys,
            self._coordinator.address,
            ThreadRuntime(host, cluster.stall_timeout_s, other_ports(cluster.port_range)),
            partial(find, self._coordinator, cluster.stall_timeout_s),
            version=self._version,
        )
        if self._stopping:  # `stop` found no server
            self._server.stop()
        self._start, self._served = self._timeline.finish(), threading.Event()
        run = partial(self._run, self._server)
        self._thread = threading.Thread(target=run, name="swell-engine", daemon=True)
        self._thread.start()

    def adopt(self, by: ManagerId) -> str:
        """Returns the version that it runs, or is about to run. From now on no earlier manager can
        stop it, although its call may arrive late. Raises RuntimeError if it stops or has stopped:
        its process is left over from a manager that was lost while it terminated the engine, and
        the next manager must not adopt it."""
        with self._manager_lock:
            self._check_not_ended()
            self._manager = max(self._manager, by, key=lambda manager: manager.term)
            return self._version

    def _check_not_ended(self) -> None:
        if self._stopping or self._ended.is_set():
            raise RuntimeError(f"engine {self._rank} has terminated: {self._end}")

    def ready(self) -> EngineReady:
        """Returns the engine's current data, which changes if workers are replaced. Raises
        RuntimeError before it serves."""
        server = self._server
        if server is None:
            raise RuntimeError(f"engine {self._rank} is still {self._timeline.text}")
        return EngineReady(
            self._rank,
            server.address,
            server.core.limits,
            os.getpid(),
            ray.get_runtime_context().get_node_id(),
            server.workers,
            server.incarnation,
            server.member.store,
            server.version,
            self._start,
        )

    def status(self) -> StartStatus:
        """Returns what the engine is loading, for people who wait for it."""
        workers = () if self._executor is None else self._executor.workers()
        return StartStatus(self._timeline.text, workers)

    @ray.method(concurrency_group=_WATCHING)  # type: ignore[untyped-decorator]
    def ended(self, timeout_s: float) -> str | None:
        """Returns why the engine has stopped. Returns None if it has not stopped after `timeout_s`,
        or as soon as it gets other weights, because then it is another engine."""
        self._served.wait(timeout_s)
        return self._end if self._ended.is_set() else None

    def stop(self, by: ManagerId) -> None:
        """Stops the engine and waits until its workers have released their resources. An engine
        that is loading does not serve afterwards. Raises NotLeading if a later manager has adopted
        the engine."""
        with self._manager_lock:
            if by.term < self._manager.term:
                raise NotLeading(f"engine {self._rank} has been adopted by a later manager")
            self._stopping = True
        if (server := self._server) is not None:
            server.stop()
            self._ended.wait()

    def _run(self, server: EngineServer) -> None:
        served = self._served
        try:
            server.run()
        except BaseException as error:
            self._fail(error)
        else:
            if not server.keeps_core:
                self._ended.set()
        served.set()

    def _fail(self, error: BaseException) -> None:
        """Records the failure; the process exits a little later."""
        self._end = f"{type(error).__name__}: {error}"
        self._log.exception("engine failed", error)
        self._ended.set()
        self._served.set()
        threading.Thread(target=_exit_later, args=(error,), name="swell-exit", daemon=True).start()


def _exit_later(error: BaseException) -> None:
    time.sleep(_EXIT_GRACE_S)
    process.exit_process("engine", error)


def _workers_by_node(config: Config) -> Mapping[str, int]:
    """Returns the number of workers that share cores and memory, by node. Placement groups of all
    engines are in Ray's table before the process of the first one has started."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return workers_by_node(placement_group_table().values(), config, len(alive))
