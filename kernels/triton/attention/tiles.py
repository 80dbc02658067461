"""The tiles of paged attention, which `splits.py` and `exact.py` share.

A program computes BLOCK_Q query tokens of one row for all heads of one KV head, as one matrix of
BLOCK_M = BLOCK_Q * group lines, over tiles of BLOCK_N keys. It keeps the largest score m, the total
of exp(s - m), and the sum `acc` of exp(s - m) V (Milakov and Gimelshein 2018, arXiv:1805.02867).

The grid depends on the numbers of tokens and rows only, so that it can be captured: row r has the
query blocks query_start[r] // BLOCK_Q + r and following ones. A few blocks are empty.
"""

from __future__ import annotations

import triton
import triton.language as tl

from swell.kernels.triton.attention.vectors import is_quantized, load_vectors, part_size

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


@triton.jit
def load_queries(
    q, query_start, context_tokens, rows, q_token_stride, q_head_stride, WINDOW: tl.constexpr,
    LOOKAHEAD: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Returns the query block of this program: its row, the row's context, [BLOCK_M] the head and
    token of each line, whether it is a query, and its position, the queries [BLOCK_M, BLOCK_DIM],
    and the keys first .. end - 1 to which at least one of them attends; none in an empty block."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    row = _row_of(tl.program_id(0), query_start, rows, BLOCK_Q)
    start, stop = tl.load(query_start + row), tl.load(query_start + row + 1)
    index = (tl.program_id(0) - (start // BLOCK_Q + row)) * BLOCK_Q  # of a token in its row
    context, length = tl.load(context_tokens + row), stop - start
    line = tl.arange(0, BLOCK_M)
    query, head = index + line // GROUP, tl.program_id(1) * GROUP + line % GROUP
    is_query = (line < BLOCK_Q * GROUP) & (query < length)
    position = context - length + query
    token, column = (start + query).to(tl.int64), tl.arange(0, BLOCK_DIM)
    at = token[:, None] * q_token_stride + (head * q_head_stride)[:, None] + column[None, :]
    queries = tl.load(q + at, mask=is_query[:, None] & (column < DIM)[None, :], other=0.0)
    last_query = tl.minimum(index + BLOCK_Q, length) - 1
    end = tl.minimum(context, context - length + last_query + LOOKAHEAD + 1)
    first = tl.maximum(0, context - length + index - WINDOW + 1) // BLOCK_N * BLOCK_N
    end = tl.where(index < length, end, first)
    return row, context, head, token, is_query, position, queries, first, end


@triton.jit
def attend_tiles(
    queries, position, m, total, acc, first, end, k_cache, v_cache, entries, context, kv_head,
    k_block_stride, v_block_stride, SCALE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, LOOKAHEAD: tl.constexpr, DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Adds the tiles of the keys first .. end - 1 to m, total and acc. queries [BLOCK_M,
    BLOCK_DIM], position [BLOCK_M]; entries: of the row in the block table."""
    column = tl.arange(0, BLOCK_DIM)
    for tile in range(first, end, BLOCK_N):
        key = tile + tl.arange(0, BLOCK_N)  # [BLOCK_N] positions
        is_key = key < context
        block = tl.load(entries + key // BLOCK_TOKENS, mask=is_key, other=0).to(tl.int64)
        part = kv_head * part_size(k_cache.dtype.element_ty, BLOCK_TOKENS, DIM)
        index, v_part = key % BLOCK_TOKENS, block * v_block_stride + part
        # Entries of the cache after the context may contain anything, even NaN.
        keys, key_scales = load_vectors(
            k_cache, block * k_block_stride + part, index, is_key, column, queries.dtype,
            BLOCK_TOKENS, DIM,
        )  # fmt: skip
        if not is_quantized(v_cache.dtype.element_ty):
            values, _ = load_vectors(
                v_cache, v_part, index, is_key, column, queries.dtype, BLOCK_TOKENS, DIM
            )
        s = tl.dot(queries, tl.trans(keys), input_precision="ieee") * SCALE
        if is_quantized(k_cache.dtype.element_ty):
            s *= key_scales[None, :]
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
        if is_quantized(v_cache.dtype.element_ty):
            # The values are converted in registers, which the keys no longer need.
            values, scales = load_vectors(
                v_cache, v_part, index, is_key, column, queries.dtype, BLOCK_TOKENS, DIM
            )
            # Scaled here, since many scaled weights would be too small for float16.
            values = (values.to(tl.float32) * scales[:, None]).to(values.dtype)
        acc = tl.dot(p.to(values.dtype), values, acc * fade[:, None], input_precision="ieee")
        m = m_next
    return m, total, acc


@triton.jit
def empty_sums(BLOCK_M: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Returns m, total and acc without keys."""
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return m, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_DIM], tl.float32)
