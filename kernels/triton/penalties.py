"""Penalties: one program for a part of a row. Counts: one program for many pairs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Tokens of a program."""
PAIRS = 256
"""Pairs of a program that counts."""


@triton.jit
def _apply_penalties(
    logits, rows, slots, output_counts, seen, repetition, frequency, presence,
    logits_stride, counts_stride, seen_stride, vocab, BLOCK: tl.constexpr,
):  # fmt: skip
    """logits [S, vocab], tables [max_rows, vocab], all others [M]; vectors are dense."""
    i = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    slot = tl.load(slots + i)
    count = tl.load(output_counts + slot * counts_stride + token, mask=inside, other=0)
    is_seen = tl.load(seen + slot * seen_stride + token, mask=inside, other=0)
    at = logits + tl.load(rows + i) * logits_stride + token
    x = tl.load(at, mask=inside, other=0.0)
    factor = tl.where(is_seen, tl.load(repetition + i), 1.0)
    x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
    off = tl.load(frequency + i) * count.to(tl.float32)
    off += tl.load(presence + i) * (count > 0).to(tl.float32)
    tl.store(at, x - off, mask=inside)


@triton.jit
def _count_tokens(
    output_counts, seen, slots, tokens, counts_stride, seen_stride, pairs, PAIRS: tl.constexpr
):
    """Tables [max_rows, vocab]; slots, tokens [pairs]."""
    i = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = i < pairs
    slot = tl.load(slots + i, mask=inside, other=0)
    token = tl.load(tokens + i, mask=inside, other=0)
    tl.atomic_add(output_counts + slot * counts_stride + token, 1, mask=inside, sem="relaxed")
    tl.store(seen + slot * seen_stride + token, True, mask=inside)


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
    assert logits.stride(1) == output_counts.stride(1) == seen.stride(1) == 1
    of_rows = [x.contiguous() for x in (rows, slots, repetition, frequency, presence)]
    rows, slots, *strengths = of_rows
    vocab = logits.shape[1]
    if len(rows):
        # Without fused multiply-adds and with an exact quotient, the result is equal to that of
        # the other backends bit for bit.
        _apply_penalties[(len(rows), triton.cdiv(vocab, BLOCK))](
            logits, rows, slots, output_counts, seen, *strengths, logits.stride(0),
            output_counts.stride(0), seen.stride(0), vocab, BLOCK, enable_fp_fusion=False,
        )  # fmt: skip


def count_tokens(output_counts: Tensor, seen: Tensor, slots: Tensor, tokens: Tensor) -> None:
    """See `swell.kernels.penalties.count_tokens`."""
    assert output_counts.stride(1) == seen.stride(1) == 1
    slots, tokens = slots.contiguous(), tokens.contiguous()
    if pairs := len(slots):
        _count_tokens[(triton.cdiv(pairs, PAIRS),)](
            output_counts, seen, slots, tokens, output_counts.stride(0), seen.stride(0), pairs,
            PAIRS,
        )  # fmt: skip
