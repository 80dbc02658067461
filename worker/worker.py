"""A worker that runs without Ray.

At the start of an engine, its workers take their memory in this order, so that each part is known
before the KV cache gets what is left:

    load        weights
    regroup     the engine's own groups
    measure     the largest step; from this, how many blocks fit
    init_cache  the smallest number of blocks of all workers; then steps are captured

Then come steps and regroupings, and `shutdown`. A worker that replaces another one does not
measure: it has the same size. Its groups are formed last, together with those of its peers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import torch
import torch.distributed as dist

from swell.configs.runtime.log import first_line
from swell.configs.runtime.network import prepare_for_nccl
from swell.configs.runtime.process import available_cores
from swell.configs.schema import Config
from swell.kernels import backends
from swell.worker.cache_size import block_bytes, count_cache_blocks
from swell.worker.comm.mesh import GroupError, Mesh
from swell.worker.comm.rendezvous import Stores, reachable
from swell.worker.drafting.draft_loading import load_draft_model
from swell.worker.drafting.draft_model import NO_DRAFT_MODEL, NoDraftModel
from swell.worker.exactness import numerics_class
from swell.worker.hf_config import load_config, resolve_dtype
from swell.worker.layers.packed_weight import Packing, pack_weights, refuse_unquantizable
from swell.worker.loader import load_weights
from swell.worker.lora import NO_ADAPTERS, NoAdapters, OnLoaded, make_adapters
from swell.worker.memory import kv_cache
from swell.worker.memory.block_files import BlockFiles
from swell.worker.memory.gpu_memory import GpuMemory, device_of, limit_memory
from swell.worker.memory.new_weights import ModelShape, with_weights_of
from swell.worker.memory.offload_store import OffloadStore, count_offload_blocks
from swell.worker.memory.profile_run import PROFILE_BLOCKS, LargestSteps, profile
from swell.worker.memory.sleep import SleepingWeights, collect_frozen, freed_by, give_back
from swell.worker.mkl_functions import initialize_vector_math
from swell.worker.model_interfaces import Model, PoolingModel, moe_layers
from swell.worker.models import build_model
from swell.worker.moe.dp_sync import make_dp_sync
from swell.worker.moe.experts import rebalance
from swell.worker.moe.routed_experts import RouteRecorder
from swell.worker.pooling.pooler import Pooler, load_pooler, read_model_pooling
from swell.worker.runner import ModelRunner, ModelRunnerArgs
from swell.worker.wire import (
    AsyncModelRunnerOutput,
    CacheProgress,
    CaptureProgress,
    CompileProgress,
    GroupPlan,
    LoadAdapter,
    Regrouped,
    SchedulerOutput,
    StartMessage,
    WeightsSource,
    WorkerLimits,
    WorkerProgress,
)


class Worker:
    """One tensor rank of one pipeline stage of an engine.

    `rank` is 0 .. world - 1 within the engine, tensor fastest: stage * tensor + tensor_rank.
    `local_workers`: the number of the engine's workers on this machine, which share its cores.
    `gpu`: the index of this worker's GPU among those that torch sees. `progress` is called with
    the share of each phase of a start. `host`: the address of this machine at which other workers
    reach it. Several workers may be threads of one process: none keeps global state.
    """

    def __init__(
        self,
        config: Config,
        rank: int = 0,
        local_workers: int = 1,
        gpu: int = 0,
        progress: Callable[[StartMessage], None] = lambda message: None,
        host: str = "127.0.0.1",
    ) -> None:
        initialize_vector_math()
        self.config = self._given_config = config
        self.rank = rank
        self.local_workers = max(1, local_workers)
        self._progress = progress
        self._host = reachable(host)
        self.device = device_of(config.model.device, gpu)
        if self.device.type == "cuda":
            prepare_for_nccl(self._host, config.cluster.interface)
            limit_memory(self.device, config.cluster.gpus_per_worker)
        self.mesh: Mesh | None = None
        self.model: Model | None = None
        self._is_whole = False
        """Whether the models have all weights: an error or interrupt may leave one half-loaded."""
        self.pooler: Pooler | None = None
        self.draft_model: NoDraftModel = NO_DRAFT_MODEL
        self.adapters: NoAdapters = NO_ADAPTERS
        self.runner: ModelRunner | None = None
        self._offload: OffloadStore | None = None
        self._block_files: BlockFiles | None = None
        self._routes: RouteRecorder | None = None
        self._has_groups = False
        """Whether all groups are formed that steps use, and the experts of the plan are here."""
        self._captures_at_start = config.parallel.world == 1
        """Whether steps will be captured as soon as the worker can compute them. Otherwise each is
        captured when it occurs: a later runner does so, because no request should wait until all
        are captured, and a replacement, because its peers capture nothing by themselves."""
        self._progress_counter = 0
        self._cache_size: tuple[int, int, tuple[int, int]] | None = None
        """The arguments of `init_cache`."""
        self._sleeping_weights: SleepingWeights | None = None
        self._freed_bytes = 0  # while the worker sleeps
        self._tokenizer_path = config.model.path
        self._weights = WeightsSource(config.model.path, 0)
        self._shape: ModelShape | None = None
        self._mapped_bytes = 0
        """The same as `LoadedWeights.mapped_bytes`."""
        self._stores = Stores(self._host, config.cluster)
        self._dtype = torch.float32
        self._prepared = threading.local()

    @property
    def progress_counter(self) -> int:
        """Counts computed layers, or operations of replayed steps, and received parts of experts.
        May be read from any thread."""
        runner = self.runner
        return self._progress_counter + (runner.progress if runner is not None else 0)

    def load(self) -> int:
        """Builds and loads the model; returns the bytes of all its weights. With `parallel.expert`,
        experts are loaded in a later `regroup`. Raises `ValueError` for a model or a parallel
        layout that is not supported."""
        self._prepare_thread()
        backends.prepare(self.device.type, partial(self._report, CompileProgress))
        self._progress(WorkerProgress(self.rank, 0, 0))
        layout, exact = self.config.parallel, self.config.model.exact
        self.mesh = Mesh.build(layout, self.rank, device=self.device, host=self._host, exact=exact)
        return self._build_model() + self.draft_model.nbytes + self.adapters.nbytes

    def measure(self) -> WorkerLimits:
        """Measures what fits into the memory that weights and groups leave. Every worker of the
        engine calls it at the same time, after the first `regroup`. Raises `ValueError` if not even
        one KV block fits."""
        assert self._shape is not None and self.mesh is not None, "load comes first"
        self._prepare_thread()
        self._captures_at_start = True
        config = self.config
        steps = LargestSteps.of(config, self._built_model, self._shape)
        sizes = config, self._built_model, self._dtype, self.draft_model
        gpu_share, own_bytes = config.cluster.gpus_per_worker, block_bytes(*sizes)
        free_bytes = kv_cache.free_bytes(self.device, self.local_workers, gpu_share)
        if self.device.type == "cuda" and config.cache.memory_bytes is None:
            largest = steps.within(free_bytes, own_bytes).agreed(self.mesh)
            run = partial(self.profile, largest)
            free_bytes = GpuMemory(self.device, gpu_share).measure(run).cache_bytes
        mapped_bytes = self._mapped_bytes + self.draft_model.mapped_bytes
        lengths = steps.max_model_len, mapped_bytes, self.adapters.reserved_bytes
        offload_blocks = count_offload_blocks(config.cache, own_bytes)
        return WorkerLimits(
            num_blocks=count_cache_blocks(*sizes, self.device, free_bytes, *lengths),
            max_model_len=steps.max_model_len,
            vocab_size=steps.vocab_size,
            samples=steps.samples,
            keeps_kv=steps.keeps_kv,
            offload_blocks=offload_blocks if steps.keeps_kv else (0, 0),
            numerics=numerics_class(self._built_model, self._dtype, self.device),
        )

    def profile(self, steps: LargestSteps) -> Iterator[int | None]:
        """Computes the largest steps before the KV cache exists (see `profile_run.py`). Afterwards
        the worker has no more memory than before."""
        self._prepare_thread()
        self._bind_caches(PROFILE_BLOCKS)
        try:
            yield from profile(self._start_runner(steps.max_model_len), steps)
        finally:
            self._drop_caches()

    def _build_model(self) -> int:
        """Builds and loads the model; returns the bytes of its weights."""
        assert self.mesh is not None
        self._is_whole = False
        model_config = self.config.model
        pooling = read_model_pooling(model_config)
        hf_config = load_config(model_config, pools=pooling is not None)
        self._dtype = resolve_dtype(model_config, hf_config)
        shape = ModelShape(hf_config, self._dtype, pooling)
        if self._shape is not None:
            self._shape.refuse_other(shape, model_config.path)
        self._shape = shape
        packing = Packing.of(model_config, self.device, self._dtype)
        self.model = model = build_model(
            model_config, hf_config, self.mesh, self.device, self._dtype, pooling, packing
        )
        layers = model.attention_layers()
        kv_cache.refuse_unquantizable(self.config, layers, self._dtype, self.device)
        refuse_unquantizable(model, packing)
        report = partial(self._report, WorkerProgress)
        loaded = load_weights(model, model_config, lambda share: report(*share), packing)
        pack_weights(model, packing)
        self._mapped_bytes = loaded.mapped_bytes
        self.adapters = make_adapters(self.config.lora, model, self._dtype)
        if pooling is not None:
            self.pooler = load_pooler(
                pooling, cast("PoolingModel", model), model_config, self.device, self._dtype
            )
        for layer in [*model.attention_layers(), *moe_layers(model)]:
            layer.register_forward_hook(lambda *_: self._count_progress())
        self.draft_model = load_draft_model(
            self.config, hf_config, pooling, model, self.mesh, self._count_progress
        )
        self._is_whole = True
        return loaded.nbytes

    @property
    def _built_model(self) -> Model:
        assert self.model is not None, "load comes first"
        return self.model

    def init_cache(
        self, num_blocks: int, max_model_len: int, offload_blocks: tuple[int, int] = (0, 0)
    ) -> None:
        """Allocates the KV cache, the memory of offloaded blocks, and the tables that steps use;
        then captures steps, if the groups that they use are formed.

        The arguments are the engine's: the smallest limits of all its workers. Raises `OSError` if
        the file for blocks on disk cannot be created.
        """
        self._prepare_thread()
        self._cache_size = num_blocks, max_model_len, offload_blocks
        cache, total = self.config.cache, num_blocks + sum(offload_blocks)
        self._report(CacheProgress, 0, total)
        caches = self._bind_caches(num_blocks)
        self._report(CacheProgress, num_blocks, total)
        if any(offload_blocks):
            self._offload = OffloadStore(caches, offload_blocks, cache.offload_folder)
            self._report(CacheProgress, total, total)
        if cache.handover_folder is not None:
            self._block_files = BlockFiles(caches, cache, self.rank, self._count_progress)
        self._start_runner(max_model_len)
        self._capture_steps()

    def _bind_caches(self, num_blocks: int) -> list[torch.Tensor]:
        """Allocates the KV cache; returns all tensors that hold a part of a block."""
        assert self.mesh is not None, "load must be called first"
        cache, layers = self.config.cache, self._built_model.attention_layers()
        dtype = kv_cache.cache_dtype(cache, self._dtype)
        kv_cache.allocate(layers, num_blocks, cache.block_tokens, dtype, self.device)
        caches = [each for layer in layers for each in layer.caches]
        caches += self.draft_model.allocate(num_blocks, cache.block_tokens, self.device)
        if self.config.model.routed_experts:
            max_tokens = self.config.scheduler.max_tokens_per_step
            sizes = num_blocks, cache.block_tokens, max_tokens
            self._routes = RouteRecorder(self._built_model, self.mesh, *sizes, self.device)
            if self.mesh.is_last_stage:
                caches.append(self._routes.blocks)
        return [each.view(kv_cache.copied_dtype(dtype)) for each in caches]

    def execute_model(self, plan: SchedulerOutput) -> AsyncModelRunnerOutput | None:
        """Computes one step (see `ModelRunner.execute_model`)."""
        assert self.runner is not None, "init_cache must be called first"
        self._prepare_thread()
        return self.runner.execute_model(plan)

    def load_adapter(self, command: LoadAdapter, on_loaded: OnLoaded) -> None:
        """Starts to load an adapter in the background. `on_loaded` may be called on any thread."""
        self.adapters.load(command, self.rank, on_loaded)

    def regroup(self, plan: GroupPlan, store: dist.Store | None = None) -> Regrouped:
        """Leaves the groups that the plan replaces, forms new ones, and, if its KV cache exists,
        gets this worker's share of the experts. Weights and KV cache memory stay, unless the plan
        says otherwise.

        `store`: used instead of the plan's `store` by workers that share a process. Without either,
        the engine keeps its own groups. Raises `GroupError` if a peer does not join or `abort` is
        called, and `ValueError` if experts cannot be read; then the groups between engines cannot
        be used until the next plan.
        """
        assert self.mesh is not None, "load must be called first"
        self._prepare_thread()
        self.mesh.begin(plan.generation)
        if store is None and plan.store is not None:
            store = self._stores.connect(plan.store, self.mesh)
        expert_store = None
        if plan.expert_store is not None:  # the first engine hosts it
            expert_store = self._stores.connect(plan.expert_store, self.mesh, absent=[0])
        if plan.keep_states and store is not None and self.runner is not None:
            self.runner.drain()
        leaves_groups = store is not None or self.mesh.shares_experts
        if leaves_groups and self.runner is not None:
            self.runner.drop_captures()
        moved = loaded = 0
        self.mesh.regroup(plan, store, expert_store)
        is_placed = not self.config.parallel.expert
        if not is_placed and self._cache_size is not None:  # otherwise peers are not known yet
            is_placed = True
            count = self._count_progress if plan.engines > 1 else self._count_unless_aborted
            try:
                moved, loaded = rebalance(self._built_model, self.mesh, self.config.model, count)
            except BaseException:
                self.mesh.abort()  # peers in a collective must not wait for this worker
                raise
        refusal = ""
        if not plan.keep_states and self._cache_size is not None:
            refusal = self._follow(plan)
        self._has_groups = is_placed
        self._capture_steps()
        return Regrouped(self.rank, plan.generation, moved, loaded, refusal, self._freed_bytes)

    def abort(self, generation: int | None = None) -> None:
        """Makes this worker's collectives fail, even the one in flight; from any thread.

        With `generation`, groups of a later plan are not aborted.
        """
        mesh = self.mesh
        if mesh is not None:
            mesh.abort(generation)

    def poll_groups(self) -> None:
        """Aborts the groups if a peer is known to have failed; from any thread. Without this, an
        operation on a GPU waits for a dead peer until the engine notices the death."""
        mesh = self.mesh
        if mesh is not None:
            mesh.poll()

    def open_store(self) -> tuple[str, int]:
        """See `Stores.open`."""
        return self._stores.open()

    def shutdown(self) -> None:
        """Leaves the groups and drops every tensor. May be called twice, and after a failure."""
        self.adapters.close()
        self.adapters = NO_ADAPTERS
        if self.runner is not None:
            self.runner.drop_captures()
        if self.mesh is not None:
            self.mesh.close()
        if self.model is not None:
            for layer in self.model.attention_layers():
                layer.unbind_cache()
        self.draft_model.unbind_cache()
        self.draft_model = NO_DRAFT_MODEL
        self._stores.close()
        self.mesh = self.model = self.pooler = self.runner = None
        self._offload = self._block_files = self._routes = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _follow(self, plan: GroupPlan) -> str:
        """Loads the weights of the plan and sets its sleep level. Returns why new weights cannot be
        used; raises `ValueError` for the weights of the configuration."""
        if plan.weights not in (None, self._weights):
            assert plan.weights is not None
            self._sleep(2)
            self._weights = plan.weights
            self.config = self._given_config
            if plan.weights.number:
                self.config = with_weights_of(self.config, plan.weights.path)
        try:
            self._set_sleep(plan.sleep_level)
            return ""
        except (OSError, ValueError) as error:
            if not self._weights.number:
                raise
            refusal = first_line(error)
        self._sleep(2)  # frees a half-loaded model
        return refusal

    def _set_sleep(self, level: int) -> None:
        """Frees memory, or allocates it again and starts with empty slots. A sleeping worker does
        not wake up to sleep less deeply."""
        assert self._cache_size is not None
        if level:
            self._freed_bytes += freed_by(self.device, lambda: self._sleep(level))
            return
        self._freed_bytes = 0
        if not self._is_whole:
            self._sleep(2)
            self._build_model()
            self.init_cache(*self._cache_size)
            collect_frozen()
        elif self.runner is None:
            if self._sleeping_weights is not None:
                self._sleeping_weights.wake()
                self._sleeping_weights = None
            self.init_cache(*self._cache_size)
        else:
            self._start_runner(self._cache_size[1])

    def _sleep(self, level: int) -> None:
        """Frees memory (see `GroupPlan.sleep_level`). On CPU, weights are in host memory
        already."""
        self._drop_caches()
        if self.model is None:
            return
        if level > 1:
            self.adapters.close()
            self.adapters = NO_ADAPTERS
            self.draft_model = NO_DRAFT_MODEL
            self.model = self.pooler = self._sleeping_weights = None
            self._is_whole = False
        elif self.device.type == "cuda" and self._sleeping_weights is None:
            whole, self._is_whole = self._is_whole, False
            self._sleeping_weights = SleepingWeights(self.model, *self.draft_model.modules)
            self._is_whole = whole
        give_back(self.device)

    def _drop_caches(self) -> None:
        """Drops everything that `init_cache` has made, captures first: they keep memory."""
        if self.runner is not None:
            self.runner.drop_captures()
        self._progress_counter, self.runner = self.progress_counter, None
        self._offload = self._block_files = self._routes = None
        if self.model is not None:
            for layer in self.model.attention_layers():
                layer.unbind_cache()
            self.draft_model.unbind_cache()

    def _start_runner(self, max_model_len: int) -> ModelRunner:
        """Starts with empty slots and an unused KV cache."""
        assert self.mesh is not None, "load comes first"
        self._progress_counter, self.runner = self.progress_counter, None
        args = ModelRunnerArgs(
            model=self._built_model,
            mesh=self.mesh,
            scheduler=self.config.scheduler,
            cache=self.config.cache,
            max_model_len=max_model_len,
            device=self.device,
            enforce_eager=self.config.model.enforce_eager,
            logprobs_mode=self.config.model.logprobs_mode,
            compute_nans_in_logits=self.config.model.compute_nans_in_logits,
            tokenizer_path=self._tokenizer_path,
            pooler=self.pooler,
            offload=self._offload,
            block_files=self._block_files,
            draft_tokens=self.config.drafts.step_tokens,
            adapters=self.adapters,
            routes=self._routes,
            draft_model=self.draft_model,
            dp_sync=make_dp_sync(
                self._built_model, self.mesh, self.config.parallel, self._count_progress
            ),
        )
        self.runner = ModelRunner(args)
        return self.runner

    def _capture_steps(self) -> None:
        """Captures steps once, as soon as the worker can compute them."""
        if self.runner is not None and self._has_groups and self._captures_at_start:
            self._captures_at_start = False
            if self.runner.mesh.data.size == 1:  # other engines may have captured them already
                self.runner.capture_steps(partial(self._report, CaptureProgress))

    def _report(self, kind: type[StartMessage], *counts: int) -> None:
        self._count_progress()
        self._progress(kind(self.rank, *counts))

    def _count_progress(self) -> None:
        self._progress_counter += 1

    def _count_unless_aborted(self) -> None:
        """Counts progress, or raises if a newer group may be waiting for this worker: no peer waits
        for experts that an engine loads only for itself, so no collective would show the abort."""
        assert self.mesh is not None
        if self.mesh.is_aborted:
            raise GroupError("aborted while it loaded all experts")
        self._count_progress()

    def _prepare_thread(self) -> None:
        """Sets the number of OpenMP threads and the current GPU in the calling thread: both are
        per-thread settings."""
        if getattr(self._prepared, "done", False):
            return
        self._prepared.done = True
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            return
        threads = self.config.model.cpu_threads or available_cores() // self.local_workers
        torch.set_num_threads(max(1, threads))
