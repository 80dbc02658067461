"""Numbers of fewer than 8 bits, and floats of 4 and 8 bits, as they are stored."""

from __future__ import annotations

import torch

from swell.kernels.weights.quantized import Numbers


def unpack_integers(words: torch.Tensor, bits: int) -> torch.Tensor:
    """words [..., W] int32, each row a stream of unsigned numbers, lowest bits first -> [..., N]
    uint8"""
    if 8 % bits == 0:
        # A new tensor: `contiguous` keeps the strides of dimensions of size 1.
        octets = torch.empty(words.shape, dtype=words.dtype).copy_(words).view(torch.uint8)
        per_octet = 8 // bits
        parts = [(octets >> (bits * i)) & ((1 << bits) - 1) for i in range(per_octet)]
        return torch.stack(parts, dim=-1).flatten(-2)
    starts = torch.arange(words.shape[-1] * 32 // bits) * bits
    wide = words.to(torch.int64) & 0xFFFFFFFF
    wide = torch.cat([wide, torch.zeros_like(wide[..., :1])], dim=-1)
    pairs = wide[..., :-1] | (
        wide[..., 1:] << 32
    )  # a number may begin in one word and end in the next
    numbers = pairs.index_select(-1, starts // 32) >> (starts % 32)
    return (numbers & ((1 << bits) - 1)).to(torch.uint8)


def unpack_halves(octets: torch.Tensor) -> torch.Tensor:
    """octets [..., N] uint8, each with two numbers of 4 bits, the first in the lower half ->
    [..., 2 N] uint8"""
    return torch.stack([octets & 15, octets >> 4], dim=-1).flatten(-2)


def float_values(codes: torch.Tensor) -> torch.Tensor:
    """Returns the values of floats of 4 bits, float32."""
    return Numbers.E2M1.float_values(codes.device)[codes.long()]


def scale_values(scales: torch.Tensor) -> torch.Tensor:
    """Returns stored scales as float32. uint8: the exponents of E8M0, so powers of two."""
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    return scales.to(torch.float32)
