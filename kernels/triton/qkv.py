"""Norms, rotation and cache write in one kernel: one program for each head of each token.

qkv[t]   [ queries: heads ][ keys: kv_heads ][ values: kv_heads ]
              |                  |                 |
            norm, rope        norm, rope           |
              v                  v                 v
            q[t]              k_cache            v_cache        at the token's slot
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from swell.kernels.host.cache_format import head_dim_of
from swell.kernels.reference import qkv as reference
from swell.kernels.triton.attention.vectors import (
    as_pointer,
    is_computed,
    part_size,
    store_vector,
)


@triton.jit
def _prepare(
    qkv, q_weight, k_weight, cos, sin, k_cache, v_cache, slots, q,
    qkv_stride, k_block_stride, v_block_stride, EPS: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr, NORMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Shapes as in `prepare`; q [T, HEADS, DIM], cos and sin [T, HALF]; all are contiguous."""
    token, head, columns = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    inside = columns < DIM
    vector = qkv + token * qkv_stride + head * DIM
    values = tl.load(vector + columns, mask=inside, other=0.0)
    if head < HEADS + KV_HEADS:  # a query or a key
        # Column i is rotated with column i + HALF, and the other way round.
        is_first, is_rotated = columns < HALF, columns < 2 * HALF
        partner = tl.where(is_first, columns + HALF, columns - HALF)
        others = tl.load(vector + partner, mask=is_rotated, other=0.0).to(tl.float32)
        wide = values.to(tl.float32)
        if NORMS:
            weight = q_weight if head < HEADS else k_weight
            inverse = tl.rsqrt(tl.sum(wide * wide) / DIM + EPS)
            wide = _scale(wide, inverse, weight + columns, inside, qkv.dtype.element_ty)
            others = _scale(others, inverse, weight + partner, is_rotated, qkv.dtype.element_ty)
        angle = token * HALF + columns % HALF
        c = tl.load(cos + angle, mask=is_rotated, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=is_rotated, other=0.0).to(tl.float32)
        turned = wide * c + tl.where(is_first, -(others * s), others * s)
        values = tl.where(is_rotated, turned, wide).to(qkv.dtype.element_ty)
    if head < HEADS:
        tl.store(q + (token * HEADS + head) * DIM + columns, values, mask=inside)
    else:
        slot = tl.load(slots + token)
        block, kv_head = slot // BLOCK_TOKENS, (head - HEADS) % KV_HEADS
        part = kv_head * part_size(k_cache.dtype.element_ty, BLOCK_TOKENS, DIM)
        index = slot % BLOCK_TOKENS
        k_part, v_part = block * k_block_stride + part, block * v_block_stride + part
        if head < HEADS + KV_HEADS:
            store_vector(k_cache, k_part, index, columns, values, slot >= 0, BLOCK_TOKENS, DIM)
        else:
            store_vector(v_cache, v_part, index, columns, values, slot >= 0, BLOCK_TOKENS, DIM)


@triton.jit
def _scale(x, inverse, weight, inside, dtype: tl.constexpr):
    """Returns weight * round(x * inverse), rounded to `dtype`, in float32. The inner `round` is to
    the type of the weight."""
    normed = (x * inverse).to(weight.dtype.element_ty).to(tl.float32)
    scale = tl.load(weight, mask=inside, other=0.0).to(tl.float32)
    return (scale * normed).to(dtype).to(tl.float32)


def prepare(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    caches: tuple[Tensor, Tensor],
    slot_mapping: Tensor,
) -> Tensor:
    """See `swell.kernels.qkv.prepare`."""
    k_cache, v_cache = caches
    weights = norms or (qkv, qkv)
    kinds = {weight.dtype for weight in weights}
    if not is_computed(qkv, k_cache) or kinds not in ({qkv.dtype}, {torch.float32}):
        return reference.prepare(qkv, norms, eps, cos, sin, caches, slot_mapping)
    assert qkv.stride(1) == 1 and k_cache.dtype == v_cache.dtype
    (_, kv_heads, block_tokens), head_dim = k_cache.shape[:3], head_dim_of(k_cache)
    tokens, heads = len(qkv), qkv.shape[1] // head_dim - 2 * kv_heads
    q = torch.empty(tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if tokens:
        # Without fused multiply-adds the rotation is equal to that of `kernels/rope.py` bit for
        # bit.
        _prepare[(tokens, heads + 2 * kv_heads)](
            qkv, *weights, cos.contiguous(), sin.contiguous(),
            as_pointer(k_cache), as_pointer(v_cache), slot_mapping, q,
            qkv.stride(0), k_cache.stride(0), v_cache.stride(0), eps,
            heads, kv_heads, block_tokens, head_dim, cos.shape[1], norms is not None,
            BLOCK=triton.next_power_of_2(head_dim), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return q
