"""The number of KV blocks of a worker, and their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import torch

from swell.configs.runtime.process import available_memory_bytes
from swell.configs.scheduler import SchedulerConfig
from swell.configs.schema import CacheConfig, Config
from swell.kernels.host.cache_format import LIMITS, SCALE_BYTES, cache_width
from swell.worker.layers.attention import Attention
from swell.worker.memory import host_memory

_QUANTIZED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Value of `cache.dtype` -> the type of the caches."""


def cache_dtype(cache: CacheConfig, dtype: torch.dtype) -> torch.dtype:
    """Returns the type in which K and V are stored; `dtype`: the model's."""
    return _QUANTIZED.get(cache.dtype, dtype)


def copied_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the type as which caches of this type are copied to other memory."""
    return torch.int8 if dtype in LIMITS else dtype


def refuse_unquantizable(
    config: Config, layers: Sequence[Attention], dtype: torch.dtype, device: torch.device
) -> None:
    """Raises `ValueError` if the KV cache of a model cannot have the configured type; `dtype`: the
    model's."""
    if config.cache.dtype not in _QUANTIZED:
        return
    key, or_not = f"cache.dtype={config.cache.dtype}", "or set cache.dtype=auto"
    if not keeps_kv(layers):
        raise ValueError(
            f"{key}: tokens of this model attend to later tokens, so a text is computed in one "
            "step, and no K and V are kept; set cache.dtype=auto"
        )
    if device.type != "cuda":
        return
    if dtype == torch.float32:
        raise ValueError(
            f"{key}: a GPU needs model.dtype=bfloat16 or float16 for it, but the type of this "
            f"model is float32; set model.dtype, {or_not}"
        )
    if config.model.exact:
        raise ValueError(
            f"{key}: a GPU does not compute attention over it exactly; set model.exact=false, "
            f"{or_not}"
        )
    if odd := [layer.head_dim for layer in layers if layer.head_dim % SCALE_BYTES]:
        raise ValueError(
            f"{key}: the model has attention heads of {odd[0]}, but a GPU needs a multiple of "
            f"{SCALE_BYTES} for it; use model.device=cpu, {or_not}"
        )


def keeps_kv(layers: Sequence[Attention]) -> bool:
    """Whether later steps read K and V of these layers. If tokens attend to later tokens, a whole
    text is computed in one step, and nothing is kept."""
    return not any(layer.lookahead for layer in layers)


def blocks_of_steps(scheduler: SchedulerConfig, block_tokens: int) -> int:
    """Returns the number of blocks for all steps in flight, in which each row may leave one block
    partly empty, plus one block per running row that the scheduler keeps free."""
    rows = scheduler.max_rows
    step = -(-scheduler.max_tokens_per_step // block_tokens) + rows
    return scheduler.steps_in_flight * step + rows


def bytes_per_block(layers: Sequence[Attention], block_tokens: int, dtype: torch.dtype) -> int:
    """Returns the bytes of one block in all layers, K and V together. `dtype`: of the caches."""
    if not keeps_kv(layers):
        layers = layers[:1]
    elements = sum(layer.kv_heads * cache_width(layer.head_dim, dtype) for layer in layers)
    return 2 * elements * block_tokens * dtype.itemsize


def free_bytes(device: torch.device, local_workers: int, gpu_share: float = 1.0) -> int:
    """Returns the free bytes of the device; on CPU, this worker's share of the free memory of the
    machine, within its cgroup limits. `gpu_share`: the part of a GPU that this process may use;
    other processes, which use the rest, may not have allocated their memory yet."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if gpu_share == 1:
            return free
        return max(0, min(free, int(total * gpu_share) - torch.cuda.memory_reserved(device)))
    return available_memory_bytes() // local_workers


def count_blocks(
    cache: CacheConfig,
    block_bytes: int,
    free: int,
    useful_blocks: int | None,
    fraction: float,
) -> int:
    """Returns the number of blocks of the cache.

    `free`: unused bytes of the device; `fraction`: the part of them that the cache may take;
    `useful_blocks`: the most blocks that the rows can use (None: memory is the only limit). Raises
    `ValueError` if not even one fits.
    """
    if block_bytes == 0:  # a stage without attention
        return useful_blocks or 1
    budget = cache.memory_bytes or int(free * fraction)
    blocks = budget // block_bytes
    if blocks < 1:
        limit = (
            f"cache.memory_bytes={cache.memory_bytes}"
            if cache.memory_bytes
            else f"cache.memory_fraction={fraction:g} of {free} free bytes"
        )
        raise ValueError(
            f"no KV block of {cache.block_tokens} tokens fits: it needs {block_bytes} bytes, but "
            f"{limit} allows {budget}; raise the limit, lower cache.block_tokens, or split the "
            "model over more workers with parallel.tensor or parallel.pipeline"
        )
    return blocks if useful_blocks is None else min(blocks, useful_blocks)


def allocate(
    layers: Sequence[Attention],
    num_blocks: int,
    block_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Binds a zeroed cache of `num_blocks` blocks to every layer; `dtype`: of the caches. On CPU it
    takes memory when it is written.

    Layers that do not keep K and V are equal, and share one cache in turn.
    """
    own = layers if keeps_kv(layers) else layers[:1]
    shapes = [
        (num_blocks, layer.kv_heads, block_tokens, cache_width(layer.head_dim, dtype))
        for layer in own
    ]
    both = [shape for shape in shapes for _ in ("keys", "values")]
    caches = cycle(host_memory.zeros(both, dtype, device))
    for layer in layers:
        layer.bind_cache(next(caches), next(caches))


def block_rows(cache: torch.Tensor) -> torch.Tensor:
    """[blocks, ...] -> [blocks, bytes]: the raw bytes of each block."""
    return cache.view(torch.uint8).view(len(cache), -1)
