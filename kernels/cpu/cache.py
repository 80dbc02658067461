"""Writes K and V with `cache.cpp`, which copies bytes and so supports any type."""

from __future__ import annotations

import torch
from torch import Tensor

from swell.kernels.cpu.graph import INT, POINTER, Function

_write = Function(
    "swell_write_kv",
    "tokens",
    **dict.fromkeys(("k", "v", "k_cache", "v_cache", "slots"), POINTER),
    **dict.fromkeys(("tokens", "kv_heads", "head_bytes", "block_tokens"), INT),
    **dict.fromkeys(("k_stride", "v_stride", "k_block_stride", "v_block_stride"), INT),
)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `swell.kernels.cache.write_kv`."""
    assert k.dtype == v.dtype == k_cache.dtype == v_cache.dtype
    assert k_cache[0].is_contiguous() and v_cache[0].is_contiguous()
    assert slot_mapping.dtype == torch.int64 and slot_mapping.is_contiguous()
    tokens, kv_heads, head_dim = k.shape
    k, v = _dense_heads(k), _dense_heads(v)
    size = k.element_size()
    _write(
        k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(),
        slot_mapping.data_ptr(), tokens, kv_heads, head_dim * size, k_cache.shape[2],
        k.stride(0) * size, v.stride(0) * size, k_cache.stride(0) * size, v_cache.stride(0) * size,
        used=(k, v, k_cache, v_cache, slot_mapping),
    )  # fmt: skip


def _dense_heads(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
