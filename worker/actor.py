"""A worker as a Ray actor, which runs a `Worker` and the `WorkerLoop` that drives it."""

from __future__ import annotations

import os
from typing import Any

import ray

from swell.configs.runtime.flight_recorder import recorder
from swell.configs.runtime.gpus import VISIBLE_GPUS, gpu_indices
from swell.configs.runtime.nccl import check_nccl
from swell.configs.runtime.network import host_address
from swell.configs.runtime.process import freeze_gc, prepare_for_torch
from swell.configs.schema import Config
from swell.coordinator.transport.channel import ChannelAddress, ChannelKeys, Outlet
from swell.worker.wire import WorkerCommand


@ray.remote(num_cpus=0, max_restarts=0)
class WorkerActor:
    """Each method is called once, in the order of the definitions."""

    def __init__(
        self,
        config: Config,
        rank: int,
        local_workers: int,
        keys: ChannelKeys,
        engine: ChannelAddress,
        heartbeats: ChannelAddress,
    ) -> None:
        """`engine` and `heartbeats`: the addresses of the two channels on the engine's side."""
        recorder().publish(engine.ipc, f"worker {rank}")
        self._rank = rank
        self._keys = keys
        self._heartbeats = heartbeats
        self._outlet: Outlet[WorkerCommand] = Outlet(engine, WorkerCommand, keys)
        self._config = config
        self._local_workers = local_workers
        self._worker: Any = None

    def load(self) -> int:
        """Loads the model; the worker is not in any group yet. Returns the process id."""
        check_nccl(self._config)
        prepare_for_torch()
        from swell.worker.worker import Worker

        gpus = gpu_indices(ray.get_gpu_ids(), os.environ.get(VISIBLE_GPUS))
        self._worker = Worker(
            self._config,
            self._rank,
            self._local_workers,
            gpu=gpus[0] if gpus else 0,
            progress=self._outlet.send,
            host=host_address(self._config.cluster.interface, ray.util.get_node_ip_address()),
        )
        self._worker.load()
        return os.getpid()

    def open_store(self) -> tuple[str, int]:
        """Hosts a store, through which the ranks of groups find each other, until the process
        terminates."""
        store: tuple[str, int] = self._worker.open_store()
        return store

    def run(self, generation: int) -> None:
        """Executes the engine's commands until `Shutdown`. `generation`: that of the engine's
        groups now."""
        from swell.worker.loop import HeartbeatThread, WorkerLoop

        freeze_gc()
        cluster = self._config.cluster
        loop = WorkerLoop(self._rank, self._worker, self._outlet, generation)
        heartbeats: Outlet[WorkerCommand] = Outlet(self._heartbeats, WorkerCommand, self._keys)
        heartbeat_interval_s = min(cluster.heartbeat_s, cluster.stall_timeout_s / 4)
        heartbeat_thread = HeartbeatThread(loop, heartbeats, heartbeat_interval_s)
        try:
            loop.run()
        finally:
            heartbeat_thread.stop()
            self._worker.shutdown()
            self._outlet.close()
