"""Exact attention (see `kernels/linear.py`): the bits of a token's result depend only on its row.

The positions are divided in parts, whose borders depend only on the positions, so that decoding,
chunks of any size and drafts give a token the same bits:

    positions   0    256   512  ...  4096    5120  ...  20480    24576  ...
                [ 16 parts of 256 ] [ 16 of 1024 ]      [ 16 of 4096 ]  [ 16384, the last: any ]

A token's parts are added one by one, in their order, either by the program that computes them all
or, if that leaves multiprocessors of the GPU without work, by a second kernel. Both round each
operation by itself (no fused multiply-adds), so the results are equal. All tiles have one size, the
bits of a line do not depend on the other lines, and keys that it does not see change no sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from swell.kernels.triton.attention import launch
from swell.kernels.triton.attention.launch import Call, power
from swell.kernels.triton.attention.tiles import LOG2_E, attend_tiles, empty_sums, load_queries

PART_TOKENS = 256
"""Positions of each of the first parts."""
MAX_PARTS = tl.constexpr(64)
MAX_PARTS_BYTES = 64 << 20
"""The most memory for parts that are computed by different programs."""


@triton.jit
def _part_of(position, PART_TOKENS: tl.constexpr):
    """Returns the part of a position: 16 parts of each of four sizes, 1, 4, 16 and 64 units."""
    unit = position // PART_TOKENS
    size = (unit >= 16).to(tl.int32) + (unit >= 80).to(tl.int32) + (unit >= 336).to(tl.int32)
    return tl.minimum(16 * size + ((unit - _first_unit(size)) >> (2 * size)), MAX_PARTS - 1)


@triton.jit
def _first_unit(size):
    """Returns the first unit of the parts of 4 ** size units: 0, 16, 80 or 336."""
    return 16 * (((1 << (2 * size)) - 1) // 3)


@triton.jit
def _begin_of(part, PART_TOKENS: tl.constexpr):
    """Returns the first position of a part; of the one after the last part, a position after all
    others."""
    size = part // 16
    unit = _first_unit(size) + ((part % 16) << (2 * size))
    return tl.where(part < MAX_PARTS, unit * PART_TOKENS, 1 << 30)


@triton.jit
def _add_part(m, total, acc, part_m, part_total, part_acc):
    """Adds a part to those before it."""
    m_next = tl.maximum(m, part_m)
    shift = tl.where(m_next == float("-inf"), 0.0, m_next)
    fade, weight = tl.exp2(m - shift), tl.exp2(part_m - shift)
    total = total * fade + part_total * weight
    return m_next, total, acc * fade[:, None] + part_acc * weight[:, None]


@triton.jit
def _with_sinks(m, total, sinks, head, mask):
    """Returns m and total with the scores that have no values."""
    if sinks is not None:
        m = tl.load(sinks + head, mask=mask, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    return m, total


@triton.jit(do_not_specialize=["tokens", "rows"])
def _attend_parts(
    q, k_cache, v_cache, query_start, context_tokens, block_table, sinks, out, parts, largest, sums,
    tokens, rows, q_token_stride, q_head_stride, k_block_stride, v_block_stride, table_stride,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, LOOKAHEAD: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DIM: tl.constexpr, parts_of,
    PART_TOKENS: tl.constexpr,
):  # fmt: skip
    """Shapes as in `paged_attention`. The third dimension of the grid is 1: a program computes all
    parts of its query block; or one program computes each part. Then parts [programs, T, heads,
    DIM], largest and sums [programs, T, heads] float32, and parts_of [2, T] int32: the first part
    of each token, and the end of its parts."""
    kv_head, program, is_divided = tl.program_id(1), tl.program_id(2), tl.num_programs(2) > 1
    row, context, head, token, is_query, position, queries, first, end = load_queries(
        q, query_start, context_tokens, rows, q_token_stride, q_head_stride, WINDOW, LOOKAHEAD,
        GROUP, DIM, BLOCK_M, BLOCK_N, BLOCK_DIM,
    )  # fmt: skip
    if first >= end:
        return
    m, total, acc = empty_sums(BLOCK_M, BLOCK_DIM)
    first_part, end_part = _part_of(first, PART_TOKENS), _part_of(end - 1, PART_TOKENS) + 1
    if is_divided:
        if program == 0 and kv_head == 0:
            tl.store(parts_of + token, first_part, mask=is_query)
            tl.store(parts_of + tokens + token, end_part, mask=is_query)
        first_part = tl.maximum(first_part, program)
        end_part = tl.minimum(end_part, program + 1)
    else:
        m, total = _with_sinks(m, total, sinks, head, is_query)
    for part in range(first_part, end_part):
        part_m, part_total, part_acc = empty_sums(BLOCK_M, BLOCK_DIM)
        part_m, part_total, part_acc = attend_tiles(
            queries, position, part_m, part_total, part_acc,
            tl.maximum(first, _begin_of(part, PART_TOKENS)),
            tl.minimum(end, _begin_of(part + 1, PART_TOKENS)), k_cache, v_cache,
            block_table + row * table_stride, context, kv_head, k_block_stride, v_block_stride,
            SCALE, WINDOW, SOFTCAP, LOOKAHEAD, DIM, BLOCK_TOKENS, BLOCK_N, BLOCK_DIM,
        )  # fmt: skip
        m, total, acc = _add_part(m, total, acc, part_m, part_total, part_acc)

    heads, column = KV_HEADS * GROUP, tl.arange(0, BLOCK_DIM)
    inside = is_query[:, None] & (column < DIM)[None, :]
    if is_divided:
        has_part, vector = first_part < end_part, (program * tokens + token) * heads + head
        to = vector[:, None] * DIM + column[None, :]
        tl.store(parts + to, acc, mask=inside & has_part)
        tl.store(largest + vector, m, mask=is_query & has_part)
        tl.store(sums + vector, total, mask=is_query & has_part)
    else:
        to = (token * heads + head)[:, None] * DIM + column[None, :]
        tl.store(out + to, acc / total[:, None], mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _add_parts(
    parts, largest, sums, parts_of, sinks, out, tokens, HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Adds the parts of one head of one token; see `_attend_parts`."""
    vector, column = tl.program_id(0).to(tl.int64) + tl.arange(0, 1), tl.arange(0, BLOCK_DIM)
    token, inside = tl.program_id(0) // HEADS, (column < DIM)[None, :]
    m, total, acc = empty_sums(1, BLOCK_DIM)
    m, total = _with_sinks(m, total, sinks, vector % HEADS, vector >= 0)
    # The entries of padded tokens may be anything.
    first_part = tl.maximum(tl.load(parts_of + token), 0)
    end_part = tl.minimum(tl.load(parts_of + tokens + token), MAX_PARTS)
    for part in range(first_part, end_part):
        at = part * tokens.to(tl.int64) * HEADS + vector
        part_acc = tl.load(parts + at[:, None] * DIM + column[None, :], mask=inside, other=0.0)
        part_m, part_total = tl.load(largest + at), tl.load(sums + at)
        m, total, acc = _add_part(m, total, acc, part_m, part_total, part_acc)
    tl.store(out + vector[:, None] * DIM + column[None, :], acc / total[:, None], mask=inside)


def attend(call: Call, out: Tensor) -> None:
    """Sets out [T, heads, head_dim]."""
    tokens, heads, head_dim = out.shape
    block_m = max(power(call.group), call.most_lines)
    programs = _count_parts(call.meta.block_table.shape[1] * call.k_cache.shape[2])
    is_too_large = programs * out.numel() * 4 > MAX_PARTS_BYTES
    if is_too_large or call.programs(block_m) * 2 > launch.PROGRAMS:
        programs = 1
    buffers = call.buffers(programs)
    parts_of = out.new_empty(2, tokens, dtype=torch.int32)
    call.launch(
        _attend_parts, out, buffers, block_m, programs, parts_of=parts_of, PART_TOKENS=PART_TOKENS,
        num_warps=8, num_stages=1 if call.block_dim > 128 else 2, enable_fp_fusion=False,
    )  # fmt: skip
    if programs > 1:
        _add_parts[(tokens * heads,)](
            *buffers, parts_of, call.scoring.sinks, out, tokens, heads, head_dim, call.block_dim,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def _count_parts(positions: int) -> int:
    """Returns the number of parts of the first positions; see `_part_of`."""
    begin, parts = 0, 0
    while begin < positions and parts < MAX_PARTS.value:
        begin += PART_TOKENS << 2 * (parts // 16)
        parts += 1
    return parts
