"""Penalties on tokens that a request has seen before."""

from __future__ import annotations

from torch import Tensor

from swell.kernels import backends


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
    """Changes the logits l of M rows in place, each by the tokens that its slot has seen.

    logits [S, V] float32; rows [M] int64, distinct, index its rows; slots [M] int64 index the
    tables output_counts [max_rows, V] int32 and seen [max_rows, V] bool, which is true for every
    token in the prompt or the output; repetition, frequency, presence [M] float32, where 1, 0 and 0
    change nothing.

        1. if the token is in prompt or output:  l = l / repetition if l > 0 else l * repetition
        2. l = l - (frequency * count + presence * [count > 0]), with its count in the output

    1 is Keskar et al. 2019, arXiv 1909.05858, with the sign rule of transformers'
    `RepetitionPenaltyLogitsProcessor`; 2 is OpenAI's ("Frequency and presence penalties" in
    https://platform.openai.com/docs/api-reference). Backends: reference, cpu,
    triton.
    """
    backends.get("penalties", logits.device.type).apply_penalties(
        logits, rows, slots, output_counts, seen, repetition, frequency, presence
    )


def count_tokens(output_counts: Tensor, seen: Tensor, slots: Tensor, tokens: Tensor) -> None:
    """Counts tokens[i] in the output of slots[i], in the tables of `apply_penalties`.

    slots, tokens [N] int64; a pair that occurs twice counts twice. Backends: reference, cpu,
    triton.
    """
    backends.get("penalties", seen.device.type).count_tokens(output_counts, seen, slots, tokens)
