"""Computes how many KV blocks fit into a worker's memory in addition to everything else it
needs."""

from __future__ import annotations

import torch

from swell.configs.schema import Config
from swell.worker.drafting.draft_model import NoDraftModel
from swell.worker.layers.moe import MoE
from swell.worker.memory import kv_cache
from swell.worker.model_interfaces import Model, moe_layers
from swell.worker.moe.experts import max_share_bytes
from swell.worker.moe.routed_experts import RouteLayout

_FRACTIONS = {"cpu": 0.8, "cuda": 1.0}
"""The default of `cache.memory_fraction`: other processes use the memory of a host, too, but on a
GPU everything else was measured."""
_GROUPS_BYTES = 512 * 1024**2
"""An estimate for the two groups between engines that share experts."""


def block_bytes(config: Config, model: Model, dtype: torch.dtype, draft_model: NoDraftModel) -> int:
    """Returns the bytes of one block: its K and V, and everything else that is kept for it.
    `dtype`: the model's."""
    block_tokens = config.cache.block_tokens
    kv_dtype = kv_cache.cache_dtype(config.cache, dtype)
    kv_bytes = kv_cache.bytes_per_block(model.attention_layers(), block_tokens, kv_dtype)
    kv_bytes += draft_model.block_bytes(block_tokens)
    if not config.model.routed_experts:
        return kv_bytes
    return kv_bytes + RouteLayout.of(model).block_bytes(block_tokens)


def count_cache_blocks(
    config: Config,
    model: Model,
    dtype: torch.dtype,
    draft_model: NoDraftModel,
    device: torch.device,
    free_bytes: int,
    length: int,
    mapped_bytes: int,
    adapter_bytes: int,
) -> int:
    """Returns how many KV blocks fit into the worker's memory. `free_bytes`: what the device has
    left, on a GPU in the largest step; `length`: tokens of the longest sequence; `mapped_bytes`:
    bytes of weights that are read from their file as they are used; `adapter_bytes`: bytes reserved
    for adapters that are loaded later. Raises `ValueError` if not even one block fits, or the
    exchange of experts does not fit."""
    cache, rows = config.cache, config.scheduler.max_rows
    useful = rows * -(-length // cache.block_tokens) if device.type == "cpu" else None
    if not kv_cache.keeps_kv(model.attention_layers()):
        useful = kv_cache.blocks_of_steps(config.scheduler, cache.block_tokens)
    free = max(0, free_bytes - mapped_bytes)  # a cache in their place would evict the weights
    if device.type == "cpu":  # offloaded blocks are in the same memory
        free = max(0, free - cache.offload_bytes)
    free = max(0, free - adapter_bytes)
    if config.parallel.expert:
        free = max(0, free - max_share_bytes(moe_layers(model), config))
        if device.type == "cuda" and cache.memory_bytes is None:
            free -= _exchange_bytes(config, model, dtype, free)
    own_bytes = block_bytes(config, model, dtype, draft_model)
    fraction = cache.memory_fraction or _FRACTIONS[device.type]
    return kv_cache.count_blocks(cache, own_bytes, free, useful, fraction)


def _exchange_bytes(config: Config, model: Model, dtype: torch.dtype, free: int) -> int:
    """Returns the memory that steps need because engines share experts: their groups, and in each
    layer the tokens and the outputs of all engines, for the most engines that the cluster may have.
    The profile run of an engine that does not know the others yet contains neither. Raises
    `ValueError` if it is more than `free` bytes."""
    layers = moe_layers(model)
    if not layers:
        return 0
    engines, tokens = config.cluster.max_engines, config.scheduler.max_tokens_per_step
    exchange_bytes = _GROUPS_BYTES
    exchange_bytes += engines * tokens * max(_bytes_per_token(layer, dtype) for layer in layers)
    if exchange_bytes > free:
        raise ValueError(
            f"the exchange of tokens between cluster.max_engines={engines} engines, with "
            f"scheduler.max_tokens_per_step={tokens} tokens of each, needs {exchange_bytes} bytes, "
            f"but only {free} are free; lower cluster.max_engines or scheduler.max_tokens_per_step"
        )
    return exchange_bytes


def _bytes_per_token(layer: MoE, dtype: torch.dtype) -> int:
    """Returns the memory of one token in a layer whose experts engines share: the token and its
    sum, its choices with their weights, and for each choice the expert's output, and its inner
    values or a copy of the output."""
    chosen, hidden, inner = layer.traits.top_k, layer.hidden, layer.traits.size
    elements = 2 * hidden + chosen * (3 + hidden + max(hidden, inner))
    return elements * dtype.itemsize + chosen * torch.int64.itemsize
