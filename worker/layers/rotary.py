"""Rotary position embedding: the angles, and the published methods to scale them.

Frequencies are computed in float32 with the same operations, in the same order, as the models'
reference implementations, so that greedy answers agree token for token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from swell.kernels.linear import embedding

Frequencies = tuple[torch.Tensor, float]
"""Inverse frequencies [head_dim / 2] float32, and a factor on cos and sin."""


class RotaryEmbedding(nn.Module):
    """Tables of cos and sin for every position below `max_positions`."""

    # [max_positions, head_dim / 2] float32 each
    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, head_dim: int, max_positions: int, rope: Mapping[str, Any]) -> None:
        """`rope` is the model's `rope_parameters`: `rope_type`, `rope_theta` and the type's own
        keys.

        Raises `ValueError` for a type that is not supported here.
        """
        super().__init__()
        kind = rope.get("rope_type") or "default"
        if kind not in FREQUENCIES:
            raise ValueError(
                f"rope_type={kind!r} is not supported natively (known: {', '.join(FREQUENCIES)}); "
                "try model.backend=transformers"
            )
        part = rope.get("partial_rotary_factor")
        if part not in (None, 1):
            raise ValueError(
                f"partial_rotary_factor={part} is not supported natively (only 1); "
                "try model.backend=transformers"
            )
        if kind == "longrope" and max_positions > rope["original_max_position_embeddings"]:
            limit = rope["original_max_position_embeddings"]
            raise ValueError(
                f"rope_type={kind!r} changes all angles beyond {limit} tokens, which makes cached "
                f"keys invalid; set model.max_model_len={limit} or less"
            )
        inverse, factor = FREQUENCIES[kind](head_dim, rope)
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = positions[:, None] * inverse[None, :]
        self.register_buffer("cos", angles.cos() * factor, persistent=False)
        self.register_buffer("sin", angles.sin() * factor, persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [T] int -> cos, sin [T, head_dim / 2] float32"""
        return embedding(positions, self.cos), embedding(positions, self.sin)


def _default(dim: int, rope: Mapping[str, Any]) -> Frequencies:
    """Unscaled frequencies: Su et al., "RoFormer" (2021)."""
    steps = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32)
    return 1.0 / (rope["rope_theta"] ** (steps / dim)), 1.0


def _linear(dim: int, rope: Mapping[str, Any]) -> Frequencies:
    """Position interpolation: every position is divided by `factor`."""
    inverse, factor = _default(dim, rope)
    inverse /= rope["factor"]
    return inverse, factor


def _llama3(dim: int, rope: Mapping[str, Any]) -> Frequencies:
    """Llama 3.1: low frequencies are divided by `factor`, high ones are kept, and those in between
    are blended."""
    inverse, scale = _default(dim, rope)
    factor, old_length = rope["factor"], rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    wavelength = 2 * math.pi / inverse
    stretched = torch.where(wavelength > old_length / low, inverse / factor, inverse)
    smooth = (old_length / wavelength - low) / (high - low)
    blended = (1 - smooth) * stretched / factor + smooth * stretched
    between = ~(wavelength < old_length / high) * ~(wavelength > old_length / low)
    return torch.where(between, blended, stretched), scale


def _yarn(dim: int, rope: Mapping[str, Any]) -> Frequencies:
    """Peng et al., "YaRN" (2023), 3.2: a ramp between interpolated and kept frequencies."""
    base, factor = rope["rope_theta"], rope["factor"]
    old_length = rope["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        """Returns the dimension that turns `rotations` times over the original length."""
        return (dim * math.log(old_length / (rotations * 2 * math.pi))) / (2 * math.log(base))

    low = dimension(rope.get("beta_fast") or 32)
    high = dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    steps = torch.arange(0, dim, 2).to(torch.float32)
    waves = base ** (steps / dim)
    inverse = 1.0 / (factor * waves) * (1 - kept) + 1.0 / waves * kept
    return inverse, _yarn_scale(rope)


def _yarn_scale(rope: Mapping[str, Any]) -> float:
    """Returns the attention temperature, as a factor on cos and sin."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def scale(weight: float) -> float:
        factor = rope["factor"]
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)


def _longrope(dim: int, rope: Mapping[str, Any]) -> Frequencies:
    """Ding et al., "LongRoPE" (2024), for sequences up to the original length: each frequency has
    a divisor of its own."""
    divisors = torch.tensor(rope["short_factor"], dtype=torch.float32)
    steps = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
    inverse = 1.0 / (divisors * rope["rope_theta"] ** steps)
    scale, factor = rope.get("attention_factor"), rope["factor"]
    if scale is None:
        length = rope["original_max_position_embeddings"]
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))
    return inverse, float(scale)


FREQUENCIES: dict[str, Callable[[int, Mapping[str, Any]], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
