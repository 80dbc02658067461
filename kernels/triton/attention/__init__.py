"""The paged KV cache, which `cache.py` writes, and attention over it: `splits.py`, `exact.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from swell.kernels.attention import MAX_HEAD_DIM, AttentionMetadata
from swell.kernels.host.cache_format import LIMITS
from swell.kernels.reference import attention as reference
from swell.kernels.reference.attention import Scoring
from swell.kernels.triton.attention import exact, splits
from swell.kernels.triton.attention.cache import write_kv
from swell.kernels.triton.attention.launch import Call
from swell.kernels.triton.attention.vectors import is_computed

__all__ = ["paged_attention", "write_kv"]


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
    is_exact_of_8_bits = meta.exact and k_cache.dtype in LIMITS
    if q.shape[2] > MAX_HEAD_DIM or is_exact_of_8_bits or not is_computed(q, k_cache):
        return reference.paged_attention(
            q, k_cache, v_cache, meta,
            scale=scale, window=window, softcap=softcap, lookahead=lookahead, sinks=sinks,
        )  # fmt: skip
    assert k_cache.dtype == v_cache.dtype
    assert meta.block_table.stride(1) == 1
    q = q if q.stride(2) == 1 else q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if len(q):
        attend = exact.attend if meta.exact else splits.attend
        attend(
            Call(q, k_cache, v_cache, meta, Scoring(scale, window, softcap, lookahead, sinks)), out
        )
    return out
