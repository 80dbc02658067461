"""Rotary embedding in place: one program for each head of each token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from swell.kernels.reference import rope as reference
from swell.kernels.triton import TYPES


@triton.jit
def _rope(x, cos, sin, token_stride, head_stride, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """x [T, heads, >= 2 * HALF]; cos, sin [T, HALF] contiguous. Each thread writes what it read."""
    token, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = columns < HALF
    c = tl.load(cos + token * HALF + columns, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + token * HALF + columns, mask=inside, other=0.0).to(tl.float32)
    first = x + token * token_stride + tl.program_id(1) * head_stride + columns
    a = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(first + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(first, a * c - b * s, mask=inside)
    tl.store(first + HALF, b * c + a * s, mask=inside)


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `swell.kernels.rope.apply_rope`."""
    if q.dtype not in TYPES or k.dtype not in TYPES or q.stride(2) != 1 or k.stride(2) != 1:
        return reference.apply_rope(q, k, cos, sin)
    cos, sin, half = cos.contiguous(), sin.contiguous(), cos.shape[1]
    for x in (q, k):
        if x.numel():
            # A fused multiply-add would round once, but the sequence of torch operations rounds
            # twice.
            _rope[x.shape[:2]](
                x, cos, sin, x.stride(0), x.stride(1), half,
                BLOCK=triton.next_power_of_2(half), num_warps=1, enable_fp_fusion=False,
            )  # fmt: skip
    return q, k
