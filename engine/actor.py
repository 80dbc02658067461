"""An engine as a Ray actor: a shell that places its workers and runs its server's loop."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import ray
from swell.configs.schema import Config
from swell.coordinator.channel import ChannelAddress, ChannelKeys
from swell.engine.core import EngineCore
from swell.engine.executor import ExecutorLimits, WorkerInfo, build_executor
from swell.engine.server import EngineServer


class EngineReady(msgspec.Struct, frozen=True):
    """What an engine tells when it can serve."""

    rank: int
    address: ChannelAddress
    limits: ExecutorLimits
    pid: int
    node: str
    workers: list[WorkerInfo]


@ray.remote(num_cpus=0, max_concurrency=4, max_restarts=0)
class EngineActor:
    """`start` loads and answers with `EngineReady`; `run` serves until `stop`."""

    def __init__(
        self, config: Config, rank: int, keys: ChannelKeys, coordinator: ChannelAddress
    ) -> None:
        self._config = config
        self._rank = rank
        self._keys = keys
        self._coordinator = coordinator
        self._server: EngineServer | None = None
        self._doing = "starting"

    def start(self, placement_group: Any) -> EngineReady:
        """Load the model and open the channel. Raises what stopped it, in words."""
        host = ray.util.get_node_ip_address()
        executor = build_executor(
            self._config, placement_group=placement_group, keys=self._keys, host=host
        )
        limits = executor.start(self._set_doing)
        core = EngineCore(self._config, executor, limits)
        self._server = EngineServer(
            self._config, self._rank, core, self._keys, self._coordinator, host
        )
        self._doing = "serving"
        node = ray.get_runtime_context().get_node_id()
        return EngineReady(
            self._rank, self._server.address, limits, os.getpid(), node, executor.workers()
        )

    def run(self) -> None:
        """Serve. The call ends when the engine does, so that its end can be watched."""
        assert self._server is not None, "start first"
        self._server.run()

    def doing(self) -> str:
        """What the engine is busy with, for people who wait."""
        return self._doing

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()

    def _set_doing(self, text: str) -> None:
        self._doing = text
