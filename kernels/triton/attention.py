"""Paged attention in one kernel for decoding, drafts, chunks of prompts and lookahead, and a merge.

A program computes BLOCK_Q query tokens of one row for all heads of one KV head, as one matrix of
BLOCK_M = BLOCK_Q * group lines, over one of SPLITS parts of the positions to which they attend:

    positions   0 ... [ tile | tile | tile ][ tile | tile | ti ] ... context
                      first                                 end
                            split 0               split 1

With one split, out = acc / total (see `attention_tiles.py`); with more, a second kernel merges the
splits. A split without work has m = -inf. Exact attention divides the positions in another way:
`exact_attention.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from swell.kernels.attention import MAX_HEAD_DIM, WHOLE_ROW, AttentionMetadata
from swell.kernels.reference import attention as reference
from swell.kernels.triton import TYPES
from swell.kernels.triton.attention_tiles import (
    LOG2_E,
    PROGRAMS,
    attend_tiles,
    empty_sums,
    keys_of,
    load_queries,
    most_lines,
    power,
)
from swell.kernels.triton.exact_attention import attend_exactly

MAX_SPLITS = 32


@triton.jit(do_not_specialize=["tokens", "rows"])
def _attend(
    q, k_cache, v_cache, query_start, context_tokens, block_table, sinks, out, parts, largest, sums,
    tokens, rows, q_token_stride, q_head_stride, k_block_stride, v_block_stride, table_stride,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, LOOKAHEAD: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DIM: tl.constexpr,
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


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    lookahead: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `swell.kernels.attention.paged_attention`."""
    tokens, heads, head_dim = q.shape
    is_computed = q.dtype in TYPES and q.dtype == k_cache.dtype == v_cache.dtype
    if not is_computed or head_dim > MAX_HEAD_DIM:
        return reference.paged_attention(
            q, k_cache, v_cache, meta,
            scale=scale, window=window, softcap=softcap, lookahead=lookahead, sinks=sinks,
        )  # fmt: skip
    assert k_cache[0].is_contiguous() and v_cache[0].is_contiguous()
    assert meta.block_table.stride(1) == 1
    q = q if q.stride(2) == 1 else q.contiguous()
    out = torch.empty(tokens, heads, head_dim, dtype=q.dtype, device=q.device)
    rows, kv_heads, block_dim = len(meta.context_tokens), k_cache.shape[1], power(head_dim)
    if not tokens:
        return out
    if meta.exact:
        scoring = reference.Scoring(scale, window, softcap, lookahead, sinks)
        return attend_exactly(q, k_cache, v_cache, meta, scoring)
    group = heads // kv_heads
    # More query tokens for each row need larger tiles.
    most = most_lines(q.dtype, block_dim)
    block_m = max(power(group), min(most, power(triton.cdiv(tokens, rows) * group)))
    query_blocks = tokens // (block_m // group) + rows
    most_splits = max(1, min(MAX_SPLITS, PROGRAMS // (query_blocks * kv_heads)))
    splits = 1 << most_splits.bit_length() - 1  # a power of two
    merged = splits if splits > 1 else 0
    parts = q.new_empty(merged, tokens, heads, head_dim, dtype=torch.float32)
    largest, sums = q.new_empty(2, merged, tokens, heads, dtype=torch.float32)
    _attend[(query_blocks, kv_heads, splits)](
        q, k_cache, v_cache, meta.query_start, meta.context_tokens, meta.block_table, sinks, out,
        parts, largest, sums, tokens, rows, q.stride(0), q.stride(1), k_cache.stride(0),
        v_cache.stride(0), meta.block_table.stride(0), scale, window or WHOLE_ROW, softcap,
        lookahead, kv_heads, group, head_dim, k_cache.shape[2], splits, block_m,
        BLOCK_N=keys_of(q.dtype, block_m, block_dim), BLOCK_DIM=block_dim,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    if merged:
        _merge[(tokens * heads,)](
            parts, largest, sums, out, tokens * heads, head_dim, splits, block_dim, num_warps=4
        )
    return out
