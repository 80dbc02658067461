"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), rotate-half ("neox") order.

With r = rotary_dim, a = x[..., : r/2], b = x[..., r/2 : r]:

    x[..., : r/2] = a cos - b sin
    x[..., r/2 : r] = b cos + a sin          x[..., r :] is unchanged
"""

from __future__ import annotations

from torch import Tensor

from swell.kernels import backends


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates q and k IN PLACE and returns them.

    q [T, heads, head_dim], k [T, kv_heads, head_dim] (views of a wider tensor are fine), cos and
    sin [T, rotary_dim / 2], rotary_dim <= head_dim. Computed in float32 and rounded once; in
    float32, the result is equal to transformers' llama bit for bit. Backends: reference, cpu,
    triton.
    """
    return backends.get("rope", q.device.type).apply_rope(q, k, cos, sin)
