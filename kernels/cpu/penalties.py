"""Penalties compiled from `penalties.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from swell.kernels.cpu.capture.recording import INT, POINTER, UnrecordedFunction

_apply = UnrecordedFunction("swell_penalties", *[POINTER] * 8, *[INT] * 3)
_count = UnrecordedFunction("swell_count", *[POINTER] * 4, *[INT] * 2)


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    slots: Tensor,
    output_counts: Tensor,
    seen: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """See `swell.kernels.penalties.apply_penalties`."""
    strengths = [x.contiguous() for x in (repetition, frequency, presence)]
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    assert all(x.dtype == torch.float32 for x in strengths)
    _check(output_counts, seen, rows, slots)
    _apply(
        *(x.data_ptr() for x in (logits, rows, slots, output_counts, seen, *strengths)),
        len(rows), logits.shape[1], logits.stride(0),
    )  # fmt: skip


def count_tokens(output_counts: Tensor, seen: Tensor, slots: Tensor, tokens: Tensor) -> None:
    """See `swell.kernels.penalties.count_tokens`."""
    _check(output_counts, seen, slots, tokens)
    params = (output_counts, seen, slots, tokens)
    _count(*(x.data_ptr() for x in params), len(slots), output_counts.shape[1])


def _check(output_counts: Tensor, seen: Tensor, *indices: Tensor) -> None:
    assert output_counts.dtype == torch.int32 and seen.dtype == torch.bool
    assert output_counts.is_contiguous() and seen.is_contiguous()
    assert all(x.dtype == torch.int64 and x.is_contiguous() for x in indices)
