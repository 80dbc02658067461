"""Bitmasks compiled from `bitmask.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from swell.kernels.cpu.capture.recording import FLOAT, INT, POINTER, UnrecordedFunction

_call = UnrecordedFunction("swell_bitmask", *[POINTER] * 3, FLOAT, *[INT] * 4)


def apply_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor, value: float) -> None:
    """See `swell.kernels.bitmask.apply_bitmask`."""
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    assert bitmask.dtype == torch.int32 and bitmask.is_contiguous()
    assert rows.dtype == torch.int64 and rows.is_contiguous() and len(rows) == len(bitmask)
    _call(
        logits.data_ptr(), bitmask.data_ptr(), rows.data_ptr(), value,
        len(rows), logits.shape[1], bitmask.shape[1], logits.stride(0),
    )  # fmt: skip
