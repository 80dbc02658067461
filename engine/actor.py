"""An engine as a Ray actor: a shell that places its workers and runs its server's loop."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import placement_group_table

from swell.configs import process
from swell.configs.log import StructuredLogger, configure_logging
from swell.configs.network import host_address, other_ports
from swell.configs.process import freeze_gc
from swell.configs.schema import Config
from swell.coordinator.contact import CoordinatorContact
from swell.coordinator.coordinator import find
from swell.coordinator.ground import ThreadGround
from swell.engine.core import EngineCore
from swell.engine.executor import build_executor
from swell.engine.executor.host_shares import workers_by_node
from swell.engine.ready import EngineReady, NewWeightsRefused
from swell.engine.server import EngineServer

_EXIT_GRACE_S = 10.0
"""The actor of a failed engine answers `ended` for so long; then its process ends."""


@ray.remote(num_cpus=0, max_concurrency=4, max_restarts=0)
class EngineActor:
    """`start` loads, begins to serve and answers with `EngineReady`; `ended` waits for the end."""

    def __init__(
        self, config: Config, rank: int, coordinator: CoordinatorContact, version: str = ""
    ) -> None:
        """`version`: of the configuration, as the roster lists it."""
        configure_logging()
        self._log = StructuredLogger("engine", rank=rank)
        self._config = config
        self._rank = rank
        self._version = version
        self._coordinator = coordinator
        self._server: EngineServer | None = None
        self._thread: threading.Thread | None = None
        self._loading = threading.Lock()
        self._status = "starting"
        self._end = "it was stopped"
        self._ended = threading.Event()
        self._served = threading.Event()
        """The engine that serves has ended, or gets other weights. Replaced by the next one."""

    def start(self, placement_group: Any, config: Config, version: str) -> EngineReady:
        """Load the model and open the channel. Raises what a worker or the configuration raised.

        A call while it loads, or later, gets the same answer: a manager that adopts an engine in
        the middle of its start calls again. One with another version, whose weights alone may
        differ, makes another engine of it, in the same processes. Raises NewWeightsRefused if they
        cannot be used; then the engine is another one of the version before."""
        with self._loading:
            if self._ended.is_set():
                raise RuntimeError(f"engine {self._rank} has ended: {self._end}")
            if self._server is None:
                self._load(placement_group)
            elif version != self._version:
                self._begin_anew(config, version)
        return self.ready()

    def _load(self, placement_group: Any) -> None:
        cluster = self._config.cluster
        self._host = host_address(cluster.interface, ray.util.get_node_ip_address())
        shares = _workers_by_node(self._config)
        executor = build_executor(
            self._config,
            placement_group=placement_group,
            keys=self._coordinator.keys,
            host=self._host,
            workers_by_node=shares,
            workers_per_machine=shares[ray.get_runtime_context().get_node_id()],
        )
        limits = executor.start(self._set_status)
        self._serve(EngineCore(self._config, executor, limits))
        freeze_gc()

    def _begin_anew(self, config: Config, version: str) -> None:
        """The engine has left its cluster. A client that has not noticed finds nothing at its
        address. A failure ends the process, but for weights that are refused."""
        server, self._server = self._server, None
        assert server is not None
        own, self._version = self._version, version
        self._status = f"reading the weights of {config.model.path}"
        refusal: ValueError | None = None
        try:
            self._end_server(server)
            try:
                server.core.begin_anew(config.model.path)
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
        """Its core is left. Raises RuntimeError if its loop has failed, or hangs in a step."""
        assert self._thread is not None
        server.stop(keeps_core=True)
        self._thread.join(self._config.cluster.stall_timeout_s)
        if self._thread.is_alive():
            raise RuntimeError("its last step did not end within cluster.stall_timeout_s")
        if self._ended.is_set():
            raise RuntimeError(f"it has ended: {self._end}")

    def _serve(self, core: EngineCore) -> None:
        cluster, host = self._config.cluster, self._host
        self._server = EngineServer(
            self._config,
            self._rank,
            core,
            self._coordinator.keys,
            self._coordinator.address,
            ThreadGround(host, cluster.stall_timeout_s, other_ports(cluster.port_range)),
            partial(find, self._coordinator, cluster.stall_timeout_s),
            version=self._version,
        )
        self._status, self._served = "serving", threading.Event()
        run = partial(self._run, self._server)
        self._thread = threading.Thread(target=run, name="swell-engine", daemon=True)
        self._thread.start()

    def version(self) -> str:
        """What it runs, or is about to run."""
        return self._version

    def ready(self) -> EngineReady:
        """The engine as it is now: workers may have been replaced. Raises RuntimeError before it
        is there."""
        server = self._server
        if server is None:
            raise RuntimeError(f"engine {self._rank} is still {self._status}")
        return EngineReady(
            self._rank,
            server.address,
            server.core.limits,
            os.getpid(),
            ray.get_runtime_context().get_node_id(),
            list(server.workers),
            server.incarnation,
            server.member.store,
            server.version,
        )

    def status(self) -> str:
        """What the engine is loading, for people who wait for it."""
        return self._status

    def ended(self, timeout_s: float) -> str | None:
        """Why the engine has ended, or None if it has not after `timeout_s`, or gets other
        weights: then nothing waits here for the engine that it was."""
        self._served.wait(timeout_s)
        return self._end if self._ended.is_set() else None

    def stop(self) -> None:
        """End the engine and wait until its workers have given back what they held."""
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
        """The process ends a little later."""
        self._end = f"{type(error).__name__}: {error}"
        self._log.exception("engine failed", error)
        self._ended.set()
        self._served.set()
        threading.Thread(target=_exit_later, args=(error,), name="swell-exit", daemon=True).start()

    def _set_status(self, text: str) -> None:
        self._status = text


def _exit_later(error: BaseException) -> None:
    time.sleep(_EXIT_GRACE_S)
    process.exit_process("engine", error)


def _workers_by_node(config: Config) -> Mapping[str, int]:
    """The workers that share cores and memory, by node. Placement groups of all engines are in
    Ray's table before the process of the first one has started."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return workers_by_node(placement_group_table().values(), config, len(alive))
