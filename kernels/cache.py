"""Writes keys and values into the paged cache.

k_cache[s // block_tokens, :, s % block_tokens] = k[t]   for s = slot_mapping[t], and v likewise.
A token with s = -1 is padding (see `swell.kernels.inputs`) and is not written.
"""

from __future__ import annotations

from torch import Tensor

from swell.kernels import backends


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Stores this step's K and V; the caches change in place.

    k, v [T, kv_heads, head_dim]; caches [blocks, kv_heads, block_tokens, head_dim] of the same
    type; slot_mapping [T] int64, each -1 or distinct and inside the cache.

    Backends: reference, cpu, triton.
    """
    backends.get("cache", k.device.type).write_kv(k, v, k_cache, v_cache, slot_mapping)
