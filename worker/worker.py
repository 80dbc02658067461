"""The life of one worker, without Ray: load, init_cache, execute_model, shutdown."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from swell.configs.schema import Config
from swell.kernels import columns
from swell.worker import kv_cache
from swell.worker.loader import load_config, load_weights, max_model_len, resolve_dtype
from swell.worker.mesh import Mesh
from swell.worker.models import build_model
from swell.worker.runner import ModelRunner
from swell.worker.wire import AsyncModelRunnerOutput, SchedulerOutput, WorkerLimits

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LoadProgress = Callable[[int, int], None]
"""Takes bytes done and bytes in all."""


class Worker:
    """One tensor rank of one pipeline stage of an engine.

    `rank` is 0 .. world - 1 within the engine, tensor fastest: stage * tensor + tensor_rank.
    `local_workers` says how many of the engine's workers share this machine and its cores;
    `local_rank` which of them this is (None: the rank's place among them), which picks the GPU.
    `progress` is told how many bytes of the weights are read, and of how many.
    Several workers may be threads of one process: nothing here is global to it.
    """

    def __init__(
        self,
        config: Config,
        rank: int = 0,
        local_workers: int = 1,
        local_rank: int | None = None,
        progress: LoadProgress | None = None,
    ) -> None:
        self.config = config
        self.rank = rank
        self.local_workers = max(1, local_workers)
        self._progress = progress
        self.device = _device(
            config.model.device, rank % self.local_workers if local_rank is None else local_rank
        )
        self.mesh: Mesh | None = None
        self.model: Any = None
        self.runner: ModelRunner | None = None
        self._dtype = torch.float32
        self._prepared = threading.local()

    def load(self, store: Store | None = None, epoch: int = 0) -> WorkerLimits:
        """Join the engine's groups of `epoch`, build and fill the model, measure the memory.

        `store` is where the engine's workers meet; one worker alone needs none. Raises
        `ValueError` for a model or a split that does not work, or that leaves no room for a cache.
        """
        self._prepare_thread()
        model_config, parallel = self.config.model, self.config.parallel
        hf_config = load_config(model_config)
        self._dtype = resolve_dtype(model_config, hf_config)
        self.mesh = Mesh.build(parallel, self.rank, store, epoch, self.device)
        self.model = build_model(model_config, hf_config, self.mesh, self.device, self._dtype)
        weight_bytes = load_weights(self.model, model_config, self._progress)
        length = max_model_len(model_config, hf_config)
        return WorkerLimits(
            num_blocks=self._count_blocks(length),
            max_model_len=length,
            vocab_size=hf_config.get_text_config().vocab_size,
            weight_bytes=weight_bytes,
            pid=os.getpid(),
        )

    def init_cache(self, num_blocks: int, max_model_len: int) -> None:
        """Allocate the KV cache and everything that steps need.

        `num_blocks` and `max_model_len` are the engine's: the least that all workers can hold.
        """
        assert self.mesh is not None, "load comes first"
        columns.prepare(self.device.type)
        cache = self.config.cache
        layers = self.model.attention_layers()
        kv_cache.allocate(layers, num_blocks, cache.block_tokens, self._dtype, self.device)
        self.runner = ModelRunner(
            self.model, self.mesh, self.config.scheduler, cache, max_model_len, self.device
        )

    def execute_model(self, plan: SchedulerOutput) -> AsyncModelRunnerOutput | None:
        """Compute one step (see `ModelRunner.execute_model`)."""
        assert self.runner is not None, "init_cache comes first"
        self._prepare_thread()
        return self.runner.execute_model(plan)

    def shutdown(self) -> None:
        """Leave the groups and drop every tensor; may be called twice, and after a failure."""
        if self.mesh is not None:
            self.mesh.close()
        if self.model is not None:
            for layer in self.model.attention_layers():
                layer.unbind_cache()
        self.mesh = self.model = self.runner = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _count_blocks(self, length: int) -> int:
        cache, rows = self.config.cache, self.config.scheduler.max_rows
        layers = self.model.attention_layers()
        block_bytes = kv_cache.bytes_per_block(layers, cache.block_tokens, self._dtype)
        useful = rows * -(-length // cache.block_tokens) if self.device.type == "cpu" else None
        free = kv_cache.free_bytes(self.device, self.local_workers)
        return kv_cache.count_blocks(cache, block_bytes, free, useful)

    def _prepare_thread(self) -> None:
        """OpenMP's team size and the current GPU belong to a thread: set them in each that works
        here."""
        if getattr(self._prepared, "done", False):
            return
        self._prepared.done = True
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            return
        threads = self.config.model.cpu_threads or _cores() // self.local_workers
        torch.set_num_threads(max(1, threads))


def _device(wanted: str, local_rank: int) -> torch.device:
    """`auto`: a GPU where there is one. Raises `ValueError` if a wanted GPU does not exist."""
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


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
