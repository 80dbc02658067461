"""Writes K and V into the paged cache: one program for each head of each token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _write_kv(
    k, v, k_cache, v_cache, slots,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    k_block_stride, v_block_stride, BLOCK_TOKENS: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """k, v [T, kv_heads, DIM]; caches [blocks, kv_heads, BLOCK_TOKENS, DIM] with dense blocks."""
    token, head, columns = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    slot = tl.load(slots + token)
    inside = (columns < DIM) & (slot >= 0)
    block, offset = slot // BLOCK_TOKENS, head * BLOCK_TOKENS + slot % BLOCK_TOKENS
    row = tl.load(k + token * k_token_stride + head * k_head_stride + columns, mask=inside)
    tl.store(k_cache + block * k_block_stride + offset * DIM + columns, row, mask=inside)
    row = tl.load(v + token * v_token_stride + head * v_head_stride + columns, mask=inside)
    tl.store(v_cache + block * v_block_stride + offset * DIM + columns, row, mask=inside)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `swell.kernels.attention.write_kv`."""
    assert k.dtype == v.dtype == k_cache.dtype == v_cache.dtype
    assert k_cache[0].is_contiguous() and v_cache[0].is_contiguous()
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    tokens, kv_heads, head_dim = k.shape
    if tokens:
        _write_kv[(tokens, kv_heads)](
            k, v, k_cache, v_cache, slot_mapping, *k.stride()[:2], *v.stride()[:2],
            k_cache.stride(0), v_cache.stride(0), k_cache.shape[2], head_dim,
            BLOCK=triton.next_power_of_2(head_dim), num_warps=1,
        )  # fmt: skip
