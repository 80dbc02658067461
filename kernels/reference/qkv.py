"""Norms, rotation and cache write, one after the other."""

from __future__ import annotations

from torch import Tensor

from swell.kernels.attention import write_kv
from swell.kernels.host.cache_format import head_dim_of
from swell.kernels.norm import rms_norm
from swell.kernels.rope import apply_rope


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
    kv_heads, head_dim = caches[0].shape[1], head_dim_of(caches[0])
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    q, k, v = qkv.unflatten(1, (-1, head_dim)).split([heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    q, k = apply_rope(q, k, cos, sin)
    write_kv(k, v, *caches, slot_mapping)
    return q
