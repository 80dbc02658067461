"""Bitmasks of allowed tokens."""

from __future__ import annotations

from torch import Tensor

from swell.kernels import backends


def apply_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor, value: float) -> None:
    """Sets logits[rows[i], t] = value, in place, for each token t whose bit is not set in
    bitmask[i].

    logits [S, V] float32; bitmask [M, ceil(V / 32)] int32, token t is bit t % 32 of word t // 32,
    as llguidance and xgrammar pack it, and bits from V on are ignored; rows [M] int64, distinct.
    `value` may be -inf, or finite so that masked tokens can be sampled as a last resort. Backends:
    reference, cpu, triton.
    """
    backends.get("bitmask", logits.device.type).apply_bitmask(logits, bitmask, rows, value)
