"""Writes K and V into the paged cache: one program for each head of each token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from swell.kernels.host.cache_format import LIMITS
from swell.kernels.reference import attention as reference
from swell.kernels.triton.attention.vectors import (
    as_pointer,
    is_computed,
    part_size,
    store_vector,
)


@triton.jit
def _write_kv(
    k, v, k_cache, v_cache, slots,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    k_block_stride, v_block_stride, BLOCK_TOKENS: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """k, v [T, kv_heads, DIM]; caches with dense blocks, as in `vectors.py`."""
    token, head, columns = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    slot = tl.load(slots + token)
    writes, block, index = slot >= 0, slot // BLOCK_TOKENS, slot % BLOCK_TOKENS
    inside = (columns < DIM) & writes
    part = head * part_size(k_cache.dtype.element_ty, BLOCK_TOKENS, DIM)
    row = tl.load(k + token * k_token_stride + head * k_head_stride + columns, mask=inside)
    store_vector(
        k_cache, block * k_block_stride + part, index, columns, row, writes, BLOCK_TOKENS, DIM
    )
    row = tl.load(v + token * v_token_stride + head * v_head_stride + columns, mask=inside)
    store_vector(
        v_cache, block * v_block_stride + part, index, columns, row, writes, BLOCK_TOKENS, DIM
    )


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `swell.kernels.attention.write_kv`."""
    assert k.dtype == v.dtype and k_cache.dtype == v_cache.dtype
    if k_cache.dtype in LIMITS and not is_computed(k, k_cache):
        return reference.write_kv(k, v, k_cache, v_cache, slot_mapping)
    assert k_cache.dtype in LIMITS or k_cache.dtype == k.dtype
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    tokens, kv_heads, head_dim = k.shape
    if tokens:
        _write_kv[(tokens, kv_heads)](
            k, v, as_pointer(k_cache), as_pointer(v_cache), slot_mapping,
            *k.stride()[:2], *v.stride()[:2],
            k_cache.stride(0), v_cache.stride(0), k_cache.shape[2], head_dim,
            BLOCK=triton.next_power_of_2(head_dim), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
