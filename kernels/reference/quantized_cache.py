"""K and V of 8 bits with a scale for each vector (see `swell.kernels.attention`)."""

from __future__ import annotations

import torch
from torch import Tensor

from swell.kernels.host.cache_format import LIMITS, SCALE_BYTES, SMALLEST, head_dim_of


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantizes vectors. x [..., head_dim] -> values [..., head_dim] of `dtype`, and their scales
    [..., 1] float32."""
    x, limit = x.float(), LIMITS[dtype]
    largest = x.abs().amax(-1, keepdim=True)
    is_zero, is_finite = largest < SMALLEST, largest.isfinite()
    scale = largest / limit
    values = torch.where(is_zero | ~is_finite, 0.0, x / scale)
    if dtype == torch.int8:
        values = values.round()
    return values.to(dtype), torch.where(is_zero, 0.0, scale)


def write(x: Tensor, cache: Tensor, block: Tensor, offset: Tensor, writes: Tensor) -> None:
    """Stores x [N, kv_heads, head_dim] at `offset` of `block`, [N] each; where `writes` [N] is
    False, the cache keeps its content."""
    head_dim, block_tokens = head_dim_of(cache), cache.shape[2]
    values, scales = quantize(x, cache.dtype)
    parts = cache.view(torch.uint8).flatten(2)  # [blocks, kv_heads, bytes]
    heads = torch.arange(cache.shape[1], device=x.device)
    first_scale = block_tokens * head_dim
    for new, start in (
        (values, offset * head_dim),
        (scales, first_scale + offset * SCALE_BYTES),
    ):
        stored = new.contiguous().view(torch.uint8)
        columns = start[:, None] + torch.arange(stored.shape[-1], device=x.device)
        at = block[:, None, None], heads[:, None], columns[:, None]
        parts[at] = torch.where(writes[:, None, None], stored, parts[at])


def read(cache: Tensor, blocks: Tensor) -> Tensor:
    """Returns the vectors of these blocks in float32: blocks [...] -> [..., kv_heads, block_tokens,
    head_dim]."""
    head_dim, block_tokens = head_dim_of(cache), cache.shape[2]
    sizes = [block_tokens * head_dim, block_tokens * SCALE_BYTES]
    values, scales = cache.view(torch.uint8).flatten(2)[blocks].split(sizes, dim=-1)
    widened = values.contiguous().view(cache.dtype).float().unflatten(-1, (-1, head_dim))
    return widened * scales.contiguous().view(torch.float32)[..., None]
