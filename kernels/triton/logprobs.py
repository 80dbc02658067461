"""Log probabilities, ranks and the most likely tokens, without a sort, in two launches.

    row     [ split 0 ][ split 1 ] ...    one program each: its largest logit, the sum of its
                  |                       exponentials, how many logits are above the selected
                  |                       one, and its best keys
              one program for the row     merges them, in the order of the splits

Keys are distinct, so the largest key below the last one is that of the next most likely token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from swell.kernels.logprobs import LogprobsTensors
from swell.kernels.reference import logprobs as reference
from swell.kernels.triton.sample.keys import NO_KEY, key_of, token_of

BLOCK = 4096
"""Tokens of a split."""
MOST_TOP = 32
"""The most tokens that the kernels rank; the reference ranks more."""


@triton.jit
def _rank_split(
    logits, token_ids, largest, sums, above, keys, logits_stride, vocab, top, splits,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """logits [N, vocab], token_ids [N]; largest, sums, above [N, splits], keys [N, splits, top]."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = split * BLOCK + tl.arange(0, BLOCK)
    own_logits = logits + row * logits_stride
    x = tl.load(own_logits + token, mask=token < vocab, other=float("-inf"))
    selected = tl.load(own_logits + tl.load(token_ids + row))
    most = tl.max(x)
    # exp(-inf - -inf) would be NaN; the sum of a split without possible tokens is 0.
    lower = x - tl.where(most == float("-inf"), 0.0, most)
    at = row * splits + split
    tl.store(largest + at, most)
    tl.store(sums + at, tl.sum(tl.exp(lower)))
    tl.store(above + at, tl.sum((x > selected).to(tl.int32)))
    key = key_of(x, token)  # those from vocab on are below all others
    for i in range(top):
        best = tl.max(key)
        tl.store(keys + at * top + i, best)
        key = tl.where(key < best, key, NO_KEY)


@triton.jit
def _merge(
    logits, token_ids, largest, sums, above, keys, ids, logprobs, ranks, logits_stride, top, splits,
    SPLITS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """ids, logprobs [N, 1 + top], ranks [N]; all others as in `_rank_split`."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    at, inside = row * splits + split, split < splits
    found = tl.load(largest + at, mask=inside, other=float("-inf"))
    most = tl.max(found)
    # NaN if most is infinite, or if a sum is NaN.
    share = tl.exp(found - most).to(tl.float64)
    total = tl.sum(share * tl.load(sums + at, mask=inside, other=0.0).to(tl.float64))
    whole = most.to(tl.float64) + tl.log(total)
    tl.store(ranks + row, 1 + tl.sum(tl.load(above + at, mask=inside, other=0).to(tl.int64)))
    own_logits, out = logits + row * logits_stride, row * (1 + top)
    selected = tl.load(token_ids + row)
    tl.store(ids + out, selected)
    tl.store(logprobs + out, (tl.load(own_logits + selected).to(tl.float64) - whole).to(tl.float32))
    candidate = tl.arange(0, KEYS)
    first = keys + row * splits * top
    key = tl.load(first + candidate, mask=candidate < splits * top, other=NO_KEY)
    for i in range(top):
        best = tl.max(key)
        token = token_of(best)
        tl.store(ids + out + 1 + i, token)
        logit = tl.load(own_logits + token).to(tl.float64)
        tl.store(logprobs + out + 1 + i, (logit - whole).to(tl.float32))
        key = tl.where(key < best, key, NO_KEY)


def rank_tokens(logits: Tensor, token_ids: Tensor, top: int) -> LogprobsTensors:
    """See `swell.kernels.logprobs.rank_tokens`; of equally likely tokens, the one with the lower id
    comes first."""
    rows, vocab = logits.shape
    top = min(top, vocab)
    if top > MOST_TOP:
        return reference.rank_tokens(logits, token_ids, top)
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    device, splits = logits.device, triton.cdiv(vocab, BLOCK)
    token_ids = token_ids.contiguous()
    ids = torch.empty(rows, 1 + top, dtype=torch.int64, device=device)
    logprobs = torch.empty(rows, 1 + top, dtype=torch.float32, device=device)
    ranks = torch.empty(rows, dtype=torch.int64, device=device)
    largest, sums = torch.empty(2, rows, splits, dtype=torch.float32, device=device)
    above = torch.empty(rows, splits, dtype=torch.int32, device=device)
    keys = torch.empty(rows, splits, top, dtype=torch.int64, device=device)
    if rows:
        _rank_split[(rows, splits)](
            logits, token_ids, largest, sums, above, keys, logits.stride(0), vocab, top, splits,
            BLOCK, num_warps=8,
        )  # fmt: skip
        _merge[(rows,)](
            logits, token_ids, largest, sums, above, keys, ids, logprobs, ranks, logits.stride(0),
            top, splits, triton.next_power_of_2(splits),
            triton.next_power_of_2(max(1, splits * top)),
        )  # fmt: skip
    return LogprobsTensors(ids, logprobs, ranks)
