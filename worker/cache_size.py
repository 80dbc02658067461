"""Computes how many KV blocks fit into a worker's memory in addition to everything else it
needs."""

from __future__ import annotations

import torch

from swell.configs.schema import Config
from swell.worker.drafting.draft_model import NoDraftModel
from swell.worker.model_interfaces import Model, moe_layers
from swell.worker.moe.experts import max_share_bytes
from swell.worker.moe.routed_experts import RouteLayout
from swell.worker.step import kv_cache


def block_bytes(config: Config, model: Model, dtype: torch.dtype, draft_model: NoDraftModel) -> int:
    """Returns the bytes of one block: its K and V, and everything else that is kept for it."""
    block_tokens = config.cache.block_tokens
    kv_bytes = kv_cache.bytes_per_block(model.attention_layers(), block_tokens, dtype)
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
    local_workers: int,
    length: int,
    mapped_bytes: int,
    adapter_bytes: int,
) -> int:
    """Returns how many KV blocks fit into the worker's memory. `length`: tokens of the longest
    sequence; `mapped_bytes`: bytes of weights that are read from their file as they are used;
    `adapter_bytes`: bytes reserved for adapters that are loaded later. Raises `ValueError` if not
    even one block fits."""
    cache, rows = config.cache, config.scheduler.max_rows
    useful = rows * -(-length // cache.block_tokens) if device.type == "cpu" else None
    if not kv_cache.keeps_kv(model.attention_layers()):
        useful = kv_cache.blocks_of_steps(config.scheduler, cache.block_tokens)
    free = kv_cache.free_bytes(device, local_workers, config.cluster.gpus_per_worker)
    free = max(0, free - mapped_bytes)  # a cache in their place would evict the weights
    if device.type == "cpu":  # offloaded blocks are in the same memory
        free = max(0, free - cache.offload_bytes)
    free = max(0, free - adapter_bytes)
    if config.parallel.expert:
        free = max(0, free - max_share_bytes(moe_layers(model), config))
    own_bytes = block_bytes(config, model, dtype, draft_model)
    return kv_cache.count_blocks(cache, own_bytes, free, useful)
