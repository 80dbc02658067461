"""Paged attention in one kernel for decoding, drafts, chunks of prompts and lookahead, and a merge.

A program computes BLOCK_Q query tokens of one row for all heads of one KV head, as one matrix of
BLOCK_M = BLOCK_Q * group lines, over one of SPLITS parts of the positions to which they attend:

    positions   0 ... [ tile | tile | tile ][ tile | tile | ti ] ... context
                      first                                 end
                            split 0               split 1

With one split, out = acc / total (see `tiles.py`); with more, a second kernel merges the splits. A
split without work has m = -inf. Exact attention divides the positions in another way: `exact.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from swell.kernels.triton.attention import launch
from swell.kernels.triton.attention.launch import Call, power
from swell.kernels.triton.attention.tiles import LOG2_E, attend_tiles, empty_sums, load_queries

MAX_SPLITS = 32


@triton.jit(do_not_specialize=["tokens", "rows"])
def _attend(
    q, k_cache, v_cache, query_start, context_tokens, block_table, sinks, out, parts, largest, sums,
    tokens, rows, q_token_stride, q_head_stride, k_block_stride, v_block_stride, table_stride,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, LOOKAHEAD: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DIM: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Shapes as in `paged_attention`; parts [SPLITS, T, heads, DIM], largest and sums
    [SPLITS, T, heads] float32."""
    kv_head, split = tl.program_id(1), tl.program_id(2)
    row, context, head, token, is_query, position, queries, first, end = load_queries(
        q, query_start, context_tokens, rows, q_token_stride, q_head_stride, WINDOW, LOOKAHEAD,
        GROUP, DIM, BLOCK_M, BLOCK_N, BLOCK_DIM,
    )  # fmt: skip
    if first >= end:
        return

    # The tiles of this split.
    tiles = tl.cdiv(tl.cdiv(end - first, BLOCK_N), SPLITS)
    first += split * tiles * BLOCK_N
    end = tl.minimum(end, first + tiles * BLOCK_N)

    m, total, acc = empty_sums(BLOCK_M, BLOCK_DIM)
    if sinks is not None and split == 0:  # a score without a value
        m = tl.load(sinks + head, mask=is_query, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    m, total, acc = attend_tiles(
        queries, position, m, total, acc, first, end, k_cache, v_cache,
        block_table + row * table_stride, context, kv_head, k_block_stride, v_block_stride,
        SCALE, WINDOW, SOFTCAP, LOOKAHEAD, DIM, BLOCK_TOKENS, BLOCK_N, BLOCK_DIM,
    )  # fmt: skip

    heads, column = KV_HEADS * GROUP, tl.arange(0, BLOCK_DIM)
    inside = is_query[:, None] & (column < DIM)[None, :]
    if SPLITS == 1:
        to = (token * heads + head)[:, None] * DIM + column[None, :]
        tl.store(out + to, acc / total[:, None], mask=inside)
    else:
        vector = (split * tokens + token) * heads + head
        tl.store(parts + vector[:, None] * DIM + column[None, :], acc, mask=inside & (first < end))
        tl.store(largest + vector, m, mask=is_query)
        tl.store(sums + vector, total, mask=is_query)


@triton.jit(do_not_specialize=["vectors"])
def _merge(
    parts, largest, sums, out, vectors, DIM: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Merges the splits of one head of one token: sum acc / sum total, weighted with exp(m)."""
    vector = tl.program_id(0).to(tl.int64)
    split, column = tl.arange(0, SPLITS).to(tl.int64), tl.arange(0, BLOCK_DIM)
    at = split * vectors + vector
    m = tl.load(largest + at)
    has_work = m > float("-inf")
    best = tl.max(m, 0)
    weight = tl.where(has_work, tl.exp2(m - tl.where(has_work, best, 0.0)), 0.0)
    # The rest of a split without work is not read: 0 * NaN would be NaN.
    loaded = has_work[:, None] & (column < DIM)[None, :]
    acc = tl.load(parts + at[:, None] * DIM + column[None, :], mask=loaded, other=0.0)
    total = tl.sum(tl.load(sums + at, mask=has_work, other=0.0) * weight, 0)
    merged = tl.sum(acc * weight[:, None], 0) / total
    tl.store(out + vector * DIM + column, merged, mask=column < DIM)


def attend(call: Call, out: Tensor) -> None:
    """Sets out [T, heads, head_dim]."""
    tokens, heads, head_dim = out.shape
    rows, group = len(call.meta.context_tokens), call.group
    # More query tokens for each row need larger tiles.
    lines = power(triton.cdiv(tokens, rows) * group)
    block_m = max(power(group), min(call.most_lines, lines))
    most_splits = max(1, min(MAX_SPLITS, launch.PROGRAMS // call.programs(block_m)))
    splits = 1 << most_splits.bit_length() - 1  # a power of two
    buffers = call.buffers(splits)
    warps, stages = (8, 1) if call.is_quantized else (4, 2)  # conversions take registers
    call.launch(
        _attend, out, buffers, block_m, splits, SPLITS=splits, num_warps=warps, num_stages=stages
    )
    if splits > 1:
        _merge[(tokens * heads,)](
            *buffers, out, tokens * heads, head_dim, splits, call.block_dim, num_warps=4
        )
