"""One worker, without Ray: load, init_cache, then steps and regroupings, shutdown."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from swell.configs.network import listening_socket, other_ports, prepare_for_nccl
from swell.configs.process import available_cores
from swell.configs.schema import Config
from swell.kernels import backends
from swell.worker import kv_cache
from swell.worker.experts import max_share_bytes, rebalance
from swell.worker.layers.packed_weight import pack_weights
from swell.worker.loader import load_config, load_weights, max_model_len, resolve_dtype
from swell.worker.mesh import GROUP_TIMEOUT_S, GroupError, Mesh
from swell.worker.models import build_model
from swell.worker.runner import ModelRunner
from swell.worker.vector_math import initialize_vector_math
from swell.worker.wire import (
    AsyncModelRunnerOutput,
    GroupPlan,
    Regrouped,
    SchedulerOutput,
    WorkerLimits,
)

LoadProgress = Callable[[int, int], None]
"""Called with (bytes read, all bytes)."""

LOOPBACK = ("localhost", "127.0.0.1", "::1")

CONNECT_S = 2.0
"""Timeout of one attempt to reach a store; between attempts the worker checks for an abort."""


class Worker:
    """One tensor rank of one pipeline stage of an engine.

    `rank` is 0 .. world - 1 within the engine, tensor fastest: stage * tensor + tensor_rank.
    `local_workers` says how many of the engine's workers share this machine and its cores;
    `local_rank` which of them this is (None: derived from the rank), which selects the GPU.
    `progress` is called while the weights are read. `host`: the address of this machine at which
    other workers reach it.
    Several workers may be threads of one process: nothing here is global to it.
    """

    def __init__(
        self,
        config: Config,
        rank: int = 0,
        local_workers: int = 1,
        local_rank: int | None = None,
        progress: LoadProgress | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        initialize_vector_math()
        self.config = config
        self.rank = rank
        self.local_workers = max(1, local_workers)
        self._progress = progress
        self._host = _reachable(host)
        self.device = _device(
            config.model.device, rank % self.local_workers if local_rank is None else local_rank
        )
        if self.device.type == "cuda":
            prepare_for_nccl(self._host, config.cluster.interface)
        self.mesh: Mesh | None = None
        self.model: Any = None
        self.runner: ModelRunner | None = None
        self._progress_counter = 0
        self._max_model_len = 0
        self._store: dist.TCPStore | None = None
        self._dtype = torch.float32
        self._prepared = threading.local()

    @property
    def progress_counter(self) -> int:
        """Layers, or operations of replayed steps, computed so far, and parts of experts that came
        to this worker; from any thread."""
        runner = self.runner
        return self._progress_counter + (runner.progress if runner is not None else 0)

    def load(self, store: dist.Store | None = None, epoch: int = 0) -> WorkerLimits:
        """Join the engine's groups of `epoch`, build and fill the model, measure the memory.

        `store`: through which the engine's workers find each other; without one, several workers
        form their groups in the first `regroup`. With `parallel.expert` a worker has no experts
        before that. Raises `ValueError` for a model or a split that is not supported, or that
        leaves no memory for a cache.
        """
        self._prepare_thread()
        model_config, parallel = self.config.model, self.config.parallel
        hf_config = load_config(model_config)
        self._dtype = resolve_dtype(model_config, hf_config)
        self.mesh = Mesh.build(parallel, self.rank, store, epoch, self.device, host=self._host)
        self.model = build_model(model_config, hf_config, self.mesh, self.device, self._dtype)
        weight_bytes = load_weights(self.model, model_config, self._progress)
        pack_weights(self.model)
        for layer in [*self.model.attention_layers(), *self._moe_layers()]:
            layer.register_forward_hook(self._count_layer)
        length = max_model_len(model_config, hf_config)
        return WorkerLimits(
            num_blocks=self._count_blocks(length),
            max_model_len=length,
            vocab_size=hf_config.get_text_config().vocab_size,
            weight_bytes=weight_bytes,
            pid=os.getpid(),
        )

    def init_cache(self, num_blocks: int, max_model_len: int) -> None:
        """Allocate the KV cache and the tables of steps.

        `num_blocks` and `max_model_len` are the engine's: the smallest limits of all its workers.
        """
        assert self.mesh is not None, "load comes first"
        backends.prepare(self.device.type)
        cache = self.config.cache
        layers = self.model.attention_layers()
        kv_cache.allocate(layers, num_blocks, cache.block_tokens, self._dtype, self.device)
        self._max_model_len = max_model_len
        self._start_runner()

    def execute_model(self, plan: SchedulerOutput) -> AsyncModelRunnerOutput | None:
        """Compute one step (see `ModelRunner.execute_model`)."""
        assert self.runner is not None, "init_cache comes first"
        self._prepare_thread()
        return self.runner.execute_model(plan)

    def regroup(self, plan: GroupPlan, store: dist.Store | None = None) -> Regrouped:
        """Leave the groups that the plan replaces, form new ones, and get this worker's part of the
        experts. The weights and the memory of the KV cache stay.

        `store`: used in place of the plan's `store` by workers that share a process. With neither,
        the engine keeps its own groups. Raises `GroupError` when a peer does not join or `abort` is
        called, `ValueError` when experts cannot be read; the groups between engines cannot be used
        then until the next plan.
        """
        assert self.mesh is not None, "load comes first"
        self._prepare_thread()
        self.mesh.begin(plan.generation)
        if store is None and plan.store is not None:
            store = self._connect(plan.store)
        expert_store = None
        if plan.expert_store is not None:  # the first engine hosts it
            expert_store = self._connect(plan.expert_store, absent=[0])
        if plan.keep_states and store is not None and self.runner is not None:
            self.runner.drain()
        moved = loaded = 0
        self.mesh.regroup(plan, store, expert_store)
        if self.config.parallel.expert:
            count = self._count_progress if plan.engines > 1 else self._count_unless_aborted
            try:
                moved, loaded = rebalance(self.model, self.mesh, self.config.model, count)
            except BaseException:
                self.mesh.abort()  # peers in a collective must not wait for this worker
                raise
        if not plan.keep_states and self.runner is not None:
            self._start_runner()
        return Regrouped(self.rank, plan.generation, moved, loaded)

    def abort(self, generation: int | None = None) -> None:
        """Make this worker's collectives fail, also the one in flight; from any thread.

        With `generation`, groups of a later plan are not aborted.
        """
        mesh = self.mesh
        if mesh is not None:
            mesh.abort(generation)

    def open_store(self) -> tuple[str, int]:
        """Host a store that exists as long as this worker; returns (host, port)."""
        if self._store is None:
            # torch itself would listen at all addresses of the host.
            ports = other_ports(self.config.cluster.port_range)
            with listening_socket(self._host, ports) as listener:
                self._store = dist.TCPStore(
                    self._host,
                    listener.getsockname()[1],
                    is_master=True,
                    wait_for_workers=False,
                    master_listen_fd=listener.detach(),
                )
        return self._host, self._store.port

    def shutdown(self) -> None:
        """Leave the groups and drop every tensor; may be called twice, and after a failure."""
        if self.mesh is not None:
            self.mesh.close()
        if self.model is not None:
            for layer in self.model.attention_layers():
                layer.unbind_cache()
        self.mesh = self.model = self.runner = self._store = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _start_runner(self) -> None:
        """Start with empty slots and an unused KV cache."""
        assert self.mesh is not None
        self._progress_counter, self.runner = self.progress_counter, None
        self.runner = ModelRunner(
            self.model,
            self.mesh,
            self.config.scheduler,
            self.config.cache,
            self._max_model_len,
            self.device,
            self.config.model.path,
        )

    def _moe_layers(self) -> list[Any]:
        return self.model.moe_layers() if hasattr(self.model, "moe_layers") else []

    def _count_layer(self, *_call: Any) -> None:
        self._count_progress()

    def _count_progress(self) -> None:
        self._progress_counter += 1

    def _count_unless_aborted(self) -> None:
        """No peer waits for experts that an engine loads for itself alone, but it may be awaited in
        a newer group."""
        assert self.mesh is not None
        if self.mesh.is_aborted:
            raise GroupError("aborted while it loaded experts for itself")
        self._count_progress()

    def _connect(self, address: tuple[str, int], absent: Sequence[int] = ()) -> dist.Store:
        """A client of the store at `address`, or the store that this worker hosts. Raises
        `GroupError`, with `absent` where the store does not answer."""
        assert self.mesh is not None
        host, port = address
        if self._store is not None and (self._store.host, self._store.port) == (
            _reachable(host),
            port,
        ):
            return self._store
        deadline = time.monotonic() + GROUP_TIMEOUT_S
        while True:
            try:
                wait = timedelta(seconds=CONNECT_S)
                store = dist.TCPStore(_reachable(host), port, is_master=False, timeout=wait)
                break
            except RuntimeError as error:
                if self.mesh.is_aborted or time.monotonic() > deadline:
                    text = f"the store at {host}:{port} does not answer: {error}"
                    raise GroupError(text.splitlines()[0], absent) from error
        store.set_timeout(timedelta(seconds=GROUP_TIMEOUT_S))
        return store

    def _count_blocks(self, length: int) -> int:
        cache, rows = self.config.cache, self.config.scheduler.max_rows
        layers = self.model.attention_layers()
        block_bytes = kv_cache.bytes_per_block(layers, cache.block_tokens, self._dtype)
        useful = rows * -(-length // cache.block_tokens) if self.device.type == "cpu" else None
        free = kv_cache.free_bytes(self.device, self.local_workers)
        if self.config.parallel.expert:
            free = max(0, free - max_share_bytes(self._moe_layers(), self.config))
        return kv_cache.count_blocks(cache, block_bytes, free, useful)

    def _prepare_thread(self) -> None:
        """Set the number of OpenMP threads and the current GPU in the calling thread: both are
        settings of a thread."""
        if getattr(self._prepared, "done", False):
            return
        self._prepared.done = True
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            return
        threads = self.config.model.cpu_threads or available_cores() // self.local_workers
        torch.set_num_threads(max(1, threads))


def _device(wanted: str, local_rank: int) -> torch.device:
    """`auto`: a GPU if there is one. Raises `ValueError` if the GPU does not exist."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("model.device=cuda, but torch sees no GPU; set model.device=cpu")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"worker {local_rank} of this machine wants a GPU of its own, but torch sees "
            f"{torch.cuda.device_count()}; lower parallel.tensor or parallel.pipeline"
        )
    return torch.device("cuda", local_rank)


def _reachable(host: str) -> str:
    """The loopback address for names of it, which may resolve to one where no store listens."""
    return "127.0.0.1" if host in LOOPBACK else host
