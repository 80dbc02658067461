"""The filters of sampling in one row: temperature and min_p give weights to tokens, top_k and top_p
keep those with the largest keys.

The search of top_k and top_p needs no sort. Each of its passes over the row divides an interval of
orders by four, so that 16 passes find any of the 2^32 orders:

    order      low ...... low + step ...... low + 2 step ...... low + 3 step ...... high
    measure    >= target         each is measured: one part remains             < target

The measure of an order is that of all tokens with at least this order: their number for top_k, the
sum of their weights for top_p.
"""

from __future__ import annotations

import triton
import triton.language as tl

from swell.kernels.triton.sample.keys import logit_of, order_of, ordered_key

EXP_UNDERFLOW = tl.constexpr(-87.0)
"""(logit - max) / temperature below which a token is never sampled."""
LOWEST_ORDER = tl.constexpr(-0x7F800001)
"""The order of -inf."""
LARGEST = tl.constexpr(3.4e38)
"""A number near the largest of float32."""
STAGES = tl.constexpr(3)
"""Blocks of a row that a pass reads ahead."""


@triton.jit
def weights_of(x, top, temperature, min_p):
    """Returns the weights of logits relative to the most likely token, whose logit is `top`. They
    are 0 for tokens that min_p or underflow excludes, and if `top` is not finite."""
    least = tl.minimum(tl.maximum(tl.log(min_p), EXP_UNDERFLOW), 0.0)
    # A product takes a tenth of the time of a quotient; 0 times infinity would be NaN.
    scaled = (x - top) * tl.minimum(tl.div_rn(1.0, temperature), LARGEST)
    return tl.where(scaled >= least, tl.exp(scaled), 0.0)


@triton.jit
def _measure(
    logits, vocab, first, second, third, top, temperature, min_p,
    WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns how many tokens have at least each of three logits, then the float64 measures of
    these tokens."""
    nothing = tl.zeros([BLOCK], tl.float32)
    sum_1, sum_2, sum_3 = nothing, nothing, nothing
    count_1, count_2, count_3 = nothing.to(tl.int32), nothing.to(tl.int32), nothing.to(tl.int32)
    for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < vocab, other=float("-inf"))
        count_1 += (x >= first).to(tl.int32)
        count_2 += (x >= second).to(tl.int32)
        count_3 += (x >= third).to(tl.int32)
        if WEIGHTED:
            # A lane adds few weights, and always the same: more tokens never have a smaller sum.
            weight = weights_of(x, top, temperature, min_p)
            sum_1 += tl.where(x >= first, weight, 0.0)
            sum_2 += tl.where(x >= second, weight, 0.0)
            sum_3 += tl.where(x >= third, weight, 0.0)
    counts = (tl.sum(count_1), tl.sum(count_2), tl.sum(count_3))
    if WEIGHTED:
        total_1 = tl.sum(sum_1.to(tl.float64))
        total_2 = tl.sum(sum_2.to(tl.float64))
        total_3 = tl.sum(sum_3.to(tl.float64))
    else:
        total_1, total_2, total_3 = (
            counts[0].to(tl.float64), counts[1].to(tl.float64), counts[2].to(tl.float64),
        )  # fmt: skip
    return counts[0], counts[1], counts[2], total_1, total_2, total_3


@triton.jit
def _choose(index, at_0, at_1, at_2, at_3):
    return tl.where(index < 2, tl.where(index == 0, at_0, at_1), tl.where(index == 2, at_2, at_3))


@triton.jit
def _search(
    logits, vocab, low, high, target, top, temperature, min_p,
    WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns the order of the last token of the smallest set of best tokens whose measure is at
    least the target, or a lower one that only the same tokens have; and how many tokens with just
    this order the set contains, `vocab` for all. The order is at least `low`, and below `high`."""
    count_low, count_high = tl.zeros([], tl.int32) + vocab, tl.zeros([], tl.int32)
    above = tl.zeros([], tl.float64)
    while (high - low > 1) & (count_low - count_high > 1):
        step = (high - low + 3) // 4
        count_1, count_2, count_3, total_1, total_2, total_3 = _measure(
            logits, vocab, logit_of(low + step), logit_of(low + 2 * step), logit_of(low + 3 * step),
            top, temperature, min_p, WEIGHTED, BLOCK,
        )  # fmt: skip
        reached = (total_1 >= target).to(tl.int64) + (total_2 >= target) + (total_3 >= target)
        count_low = _choose(reached, count_low, count_1, count_2, count_3)
        count_high = _choose(reached, count_1, count_2, count_3, count_high)
        above = _choose(reached, total_1, total_2, total_3, above)
        high = tl.minimum(high, low + (reached + 1) * step)
        low += reached * step
    ties = tl.zeros([], tl.int64) + vocab
    if count_low - count_high > 1:
        each = (
            weights_of(logit_of(low), top, temperature, min_p).to(tl.float64) if WEIGHTED else 1.0
        )
        ties = tl.maximum(tl.ceil((target - above) / each), 1.0).to(tl.int64)
    return low, ties


@triton.jit
def _find_tie(logits, vocab, logit, number, BLOCK: tl.constexpr):
    """Returns the token that is the `number`-th with this logit; `vocab` if there are fewer."""
    found, before = tl.zeros([], tl.int32) + vocab, tl.zeros([], tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < vocab, other=float("nan"))
        is_tie = (x == logit).to(tl.int32)
        is_found = (is_tie > 0) & (before + tl.cumsum(is_tie) == number)
        found = tl.minimum(found, tl.min(tl.where(is_found, token, vocab)))
        before += tl.sum(is_tie)
    return found


@triton.jit
def least_key(logits, vocab, top, temperature, top_k, top_p, min_p, BLOCK: tl.constexpr):
    """Returns the least key that top_k and top_p keep in a row."""
    low, high = tl.full([], LOWEST_ORDER, tl.int64), order_of(top).to(tl.int64) + 1
    ties = tl.zeros([], tl.int64) + vocab
    if (top_k > 0) & (top_k < vocab):
        low, ties = _search(
            logits, vocab, low, high, top_k.to(tl.float64), top, temperature, min_p, False, BLOCK
        )
    if top_p < 1:
        each = weights_of(logit_of(low), top, temperature, min_p).to(tl.float64)
        _0, _1, _2, whole, above, _3 = _measure(
            logits, vocab, logit_of(low), logit_of(low + 1), top, top, temperature, min_p, True,
            BLOCK,
        )  # fmt: skip
        target = top_p.to(tl.float64) * (above + tl.minimum(whole - above, ties * each))
        low, ties = _search(logits, vocab, low, high, target, top, temperature, min_p, True, BLOCK)
    key = ordered_key(low, tl.full([], 0xFFFFFFFF, tl.int64))
    if ties < vocab:
        key = ordered_key(low, _find_tie(logits, vocab, logit_of(low), ties, BLOCK))
    return key
