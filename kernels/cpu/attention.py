"""Paged attention compiled from `attention.cpp`, and its cache, which `cache.cpp` writes."""

from __future__ import annotations

import torch
from torch import Tensor

from swell.kernels.attention import AttentionMetadata
from swell.kernels.cpu.build import TYPES
from swell.kernels.cpu.capture.recording import FLOAT, INT, POINTER, Function
from swell.kernels.host.cache_format import LIMITS, head_dim_of
from swell.kernels.reference import attention as reference

_attention = Function(
    "swell_paged_attention",
    "rows",
    **dict.fromkeys(("q", "k_cache", "v_cache", "out"), POINTER),
    **dict.fromkeys(("query_start", "context_tokens", "block_table"), POINTER),
    **dict.fromkeys(("rows", "heads", "kv_heads", "head_dim"), INT),
    **dict.fromkeys(("block_tokens", "table_stride", "q_stride"), INT),
    **dict.fromkeys(("k_block_stride", "v_block_stride", "window", "lookahead"), INT),
    **dict.fromkeys(("is_bf16", "is_int8", "is_float8"), INT),
    **dict.fromkeys(("scale", "softcap"), FLOAT),
)
_write = Function(
    "swell_write_kv",
    "tokens",
    **dict.fromkeys(("k", "v", "k_cache", "v_cache", "slots"), POINTER),
    **dict.fromkeys(("tokens", "kv_heads", "head_dim", "item_bytes", "block_tokens"), INT),
    **dict.fromkeys(("k_stride", "v_stride", "k_block_stride", "v_block_stride"), INT),
    **dict.fromkeys(("is_int8", "is_float8", "is_bf16"), INT),
)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `swell.kernels.attention.write_kv`."""
    dtype = k_cache.dtype
    assert k.dtype == v.dtype and dtype == v_cache.dtype and (dtype in LIMITS or dtype == k.dtype)
    if dtype in LIMITS and k.dtype not in TYPES:
        return reference.write_kv(k, v, k_cache, v_cache, slot_mapping)
    assert k_cache[0].is_contiguous() and v_cache[0].is_contiguous()
    assert slot_mapping.dtype == torch.int64 and slot_mapping.is_contiguous()
    tokens, kv_heads, head_dim = k.shape
    k, v = _dense_heads(k), _dense_heads(v)
    size, cache_size = k.element_size(), k_cache.element_size()
    _write(
        k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(),
        slot_mapping.data_ptr(), tokens, kv_heads, head_dim, size, k_cache.shape[2],
        k.stride(0) * size, v.stride(0) * size,
        k_cache.stride(0) * cache_size, v_cache.stride(0) * cache_size,
        *_quantized_types(dtype), k.dtype == torch.bfloat16,
        used=(k, v, k_cache, v_cache, slot_mapping),
    )  # fmt: skip


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    lookahead: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `swell.kernels.attention.paged_attention`."""
    is_known = k_cache.dtype in LIMITS or k_cache.dtype == q.dtype
    if not is_known or q.dtype not in TYPES or sinks is not None:
        return reference.paged_attention(
            q, k_cache, v_cache, meta,
            scale=scale, window=window, softcap=softcap, lookahead=lookahead, sinks=sinks,
        )  # fmt: skip
    tokens, heads, head_dim = q.shape
    out = torch.empty((tokens, heads, head_dim), dtype=q.dtype)
    if q.stride(2) != 1 or q.stride(1) != head_dim:
        q = q.contiguous()
    assert k_cache[0].is_contiguous() and v_cache[0].is_contiguous()
    assert k_cache.dtype == v_cache.dtype and head_dim_of(k_cache) == head_dim
    query_start, context_tokens, block_table = meta[:3]
    assert query_start.dtype == context_tokens.dtype == block_table.dtype == torch.int32
    assert block_table.stride(1) == 1
    _attention(
        q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr(),
        query_start.data_ptr(), context_tokens.data_ptr(), block_table.data_ptr(),
        context_tokens.shape[0], heads, k_cache.shape[1], head_dim,
        k_cache.shape[2], block_table.stride(0), q.stride(0),
        k_cache.stride(0), v_cache.stride(0), window, lookahead,
        q.dtype == torch.bfloat16, *_quantized_types(k_cache.dtype), scale, softcap,
        used=(q, k_cache, v_cache, out, query_start, context_tokens, block_table),
    )  # fmt: skip
    return out


def _quantized_types(dtype: torch.dtype) -> tuple[bool, bool]:
    """Returns `is_int8` and `is_float8` of a cache."""
    return dtype == torch.int8, dtype == torch.float8_e4m3fn


def _dense_heads(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
