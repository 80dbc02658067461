"""Bitmasks: one program for a part of a row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Tokens of a program."""


@triton.jit
def _apply_bitmask(
    logits, bitmask, rows, value, logits_stride, bitmask_stride, vocab, BLOCK: tl.constexpr
):
    """logits [S, vocab], bitmask [M, words], rows [M]; vectors are dense."""
    mask_row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # Bits from vocab on count as set, so nothing is stored there.
    words = bitmask + mask_row * bitmask_stride
    word = tl.load(words + token // 32, mask=token < vocab, other=-1)
    # The shift copies the sign bit, which `& 1` removes.
    is_masked = (word >> (token % 32) & 1) == 0
    row = logits + tl.load(rows + mask_row) * logits_stride
    tl.store(row + token, value, mask=is_masked)


def apply_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor, value: float) -> None:
    """See `swell.kernels.bitmask.apply_bitmask`."""
    assert logits.stride(1) == bitmask.stride(1) == 1
    rows, vocab = rows.contiguous(), logits.shape[1]
    if len(rows):
        _apply_bitmask[(len(rows), triton.cdiv(vocab, BLOCK))](
            logits, bitmask, rows, value, logits.stride(0), bitmask.stride(0), vocab, BLOCK
        )
