"""Writes K and V by index assignment."""

from __future__ import annotations

from torch import Tensor


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `swell.kernels.cache.write_kv`."""
    block_tokens = k_cache.shape[2]
    block, offset = slot_mapping // block_tokens, slot_mapping % block_tokens
    k_cache[block, :, offset] = k
    v_cache[block, :, offset] = v
