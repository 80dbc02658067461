"""Paged attention in one kernel for decoding, drafts, chunks of prompts and lookahead, and a merge.

A program computes BLOCK_Q query tokens of one row for all heads of one KV head, as one matrix of
BLOCK_M = BLOCK_Q * group lines, over one of SPLITS parts of the positions to which they attend:

    positions   0 ... [ tile | tile | tile ][ tile | tile | ti ] ... context
                      first                                 end
                            split 0               split 1

For each tile of keys it keeps the largest score m, the total of exp(s - m), and the sum `acc` of
exp(s - m) V (Milakov and Gimelshein 2018, arXiv:1805.02867). With one split, out = acc / total;
with more, a second kernel merges the splits. A split without work has m = -inf.

The grid depends on the numbers of tokens and rows only, so that it can be captured: row r has the
query blocks query_start[r] // BLOCK_Q + r and following ones. A few blocks are empty.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from swell.kernels.attention import WHOLE_ROW, AttentionMetadata
from swell.kernels.reference import attention as reference
from swell.kernels.triton import TYPES

PROGRAMS = 512
"""The number of programs up to which splits are made: about four for each multiprocessor of an
H100."""
MAX_SPLITS = 32
MAX_HEAD_DIM = 256
"""The size of a head up to which a program's tiles fit into its registers."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _row_of(block, query_start, rows, BLOCK_Q: tl.constexpr):
    """Returns the last row whose first query block is not after `block`."""
    low, high = 0, rows - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start + middle) // BLOCK_Q + middle <= block:
            low = middle
        else:
            high = middle - 1
    return low


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
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head, split = tl.program_id(1), tl.program_id(2)
    row = _row_of(tl.program_id(0), query_start, rows, BLOCK_Q)
    start, stop = tl.load(query_start + row), tl.load(query_start + row + 1)
    index = (tl.program_id(0) - (start // BLOCK_Q + row)) * BLOCK_Q  # of a token in its row
    context, length = tl.load(context_tokens + row), stop - start
    if index >= length:
        return

    # [BLOCK_M]: query token and head of each line of the matrix; [BLOCK_DIM]: columns.
    line = tl.arange(0, BLOCK_M)
    query, head = index + line // GROUP, kv_head * GROUP + line % GROUP
    is_query = (line < BLOCK_Q * GROUP) & (query < length)
    position = context - length + query
    token, column = (start + query).to(tl.int64), tl.arange(0, BLOCK_DIM)
    at = token[:, None] * q_token_stride + (head * q_head_stride)[:, None] + column[None, :]
    inside = is_query[:, None] & (column < DIM)[None, :]
    queries = tl.load(q + at, mask=inside, other=0.0)

    # The tiles of this split: [first, end) of the positions to which any of the queries attends.
    last_query = tl.minimum(index + BLOCK_Q, length) - 1
    end = tl.minimum(context, context - length + last_query + LOOKAHEAD + 1)
    first = tl.maximum(0, context - length + index - WINDOW + 1) // BLOCK_N * BLOCK_N
    tiles = tl.cdiv(tl.cdiv(end - first, BLOCK_N), SPLITS)
    first += split * tiles * BLOCK_N
    end = tl.minimum(end, first + tiles * BLOCK_N)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None and split == 0:  # a score without a value
        m = tl.load(sinks + head, mask=is_query, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    acc = tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
    for tile in range(first, end, BLOCK_N):
        key = tile + tl.arange(0, BLOCK_N)  # [BLOCK_N] positions
        is_key = key < context
        entry = block_table + row * table_stride + key // BLOCK_TOKENS
        block = tl.load(entry, mask=is_key, other=0).to(tl.int64)
        offset = (kv_head * BLOCK_TOKENS + key % BLOCK_TOKENS) * DIM
        # Entries of the cache after the context may contain anything, even NaN.
        loaded = is_key[:, None] & (column < DIM)[None, :]
        k_at = (block * k_block_stride + offset)[:, None] + column[None, :]
        v_at = (block * v_block_stride + offset)[:, None] + column[None, :]
        keys = tl.load(k_cache + k_at, mask=loaded, other=0.0)
        values = tl.load(v_cache + v_at, mask=loaded, other=0.0)
        s = tl.dot(queries, tl.trans(keys), input_precision="ieee") * SCALE
        if SOFTCAP > 0:
            s = SOFTCAP * (2.0 * tl.sigmoid(2.0 * s / SOFTCAP) - 1.0)  # tanh
        seen = key[None, :] <= position[:, None] + LOOKAHEAD
        seen &= (key[None, :] > position[:, None] - WINDOW) & is_key[None, :]
        s = tl.where(seen, s * LOG2_E, float("-inf"))
        m_next = tl.maximum(m, tl.max(s, 1))
        shift = tl.where(m_next == float("-inf"), 0.0, m_next)  # -inf - -inf would be NaN
        p = tl.exp2(s - shift[:, None])
        fade = tl.exp2(m - shift)
        total = total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(values.dtype), values, acc * fade[:, None], input_precision="ieee")
        m = m_next

    heads = KV_HEADS * GROUP
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
    rows, kv_heads, block_dim = len(meta.context_tokens), k_cache.shape[1], _power(head_dim)
    if not tokens:
        return out
    group = heads // kv_heads
    # More query tokens for each row need larger tiles.
    most = 16 if q.dtype == torch.float32 or block_dim > 128 else 64
    block_m = max(_power(group), min(most, _power(triton.cdiv(tokens, rows) * group)))
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
        BLOCK_N=_keys(q.dtype, block_m, block_dim), BLOCK_DIM=block_dim,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    if merged:
        _merge[(tokens * heads,)](
            parts, largest, sums, out, tokens * heads, head_dim, splits, block_dim, num_warps=4
        )
    return out


def _power(size: int) -> int:
    """Returns the power of two that is not below a size, at least 16: a product needs that."""
    return max(16, triton.next_power_of_2(size))


def _keys(dtype: torch.dtype, block_m: int, block_dim: int) -> int:
    """Returns the number of keys of a tile: as many as fit into the registers of a program."""
    if dtype == torch.float32:
        return 16
    return 32 if block_dim > 128 or block_m * block_dim > 64 * 64 else 64
