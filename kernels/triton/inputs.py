"""A step's inputs in one kernel, after one copy of its columns to the device.

The programs of the kernel have three parts:

    program   0 ..................... | ................ | ...............
              BLOCK tokens each       | one row each     | BLOCK samples each
    each also fills the padding of its part
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from swell.kernels.host.pinned_ring import PinnedRing
from swell.kernels.host.step_columns import ColumnPacker, check_bucket, check_room
from swell.kernels.inputs import Bucket, Gather, Inputs, Sizes

BLOCK = 128
_SIZES = ("tokens", "rows", "samples", "padded_tokens", "padded_rows", "padded_samples", "blocks")


@triton.jit(do_not_specialize=_SIZES)
def _gather(
    columns, token_ids, block_table, input_ids, positions, query_start, context_tokens, row_blocks,
    slot_mapping, out_samples, tokens, rows, samples, padded_tokens, padded_rows, padded_samples,
    blocks, WIDTH: tl.constexpr, MAX_BLOCKS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    ROOM_SAMPLES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """columns as in `StepColumns`; token_ids [slots, WIDTH]; block_table [slots, MAX_BLOCKS];
    row_blocks [R, MAX_BLOCKS]; out_samples [3, ROOM_SAMPLES]; `blocks`: the most of one row."""
    program, lane = tl.program_id(0), tl.arange(0, BLOCK)
    token_programs = tl.cdiv(padded_tokens, BLOCK)
    slots, ends, shifts, contexts = (
        columns, columns + rows, columns + 2 * rows, columns + 3 * rows,
    )  # fmt: skip
    if program < token_programs:
        token = program * BLOCK + lane
        is_token, is_written = token < tokens, token < padded_tokens
        row = _row_of(token, ends, rows, is_token, BLOCK)
        slot = tl.load(slots + row, mask=is_token, other=0)
        position = token + tl.load(shifts + row, mask=is_token, other=0)
        position = tl.where(is_token, position, 0)
        found = tl.load(token_ids + slot * WIDTH + position, mask=is_token, other=0)
        entry = block_table + slot * MAX_BLOCKS + position // BLOCK_TOKENS
        block = tl.load(entry, mask=is_token, other=0).to(tl.int64)
        place = block * BLOCK_TOKENS + position % BLOCK_TOKENS
        tl.store(input_ids + token, found.to(tl.int64), mask=is_written)
        tl.store(positions + token, position, mask=is_written)
        tl.store(slot_mapping + token, tl.where(is_token, place, -1), mask=is_written)
    elif program < token_programs + padded_rows + 1:
        row = program - token_programs
        if row == padded_rows:
            tl.store(query_start, 0)
        elif row >= rows:
            tl.store(query_start + row + 1, tokens)
            tl.store(context_tokens + row, 0)
        else:
            tl.store(query_start + row + 1, tl.load(ends + row).to(tl.int32))
            tl.store(context_tokens + row, tl.load(contexts + row).to(tl.int32))
            slot = tl.load(slots + row)
            for first in range(0, blocks, BLOCK):
                index = first + lane
                entry = tl.load(block_table + slot * MAX_BLOCKS + index, mask=index < blocks)
                to = row_blocks + row.to(tl.int64) * MAX_BLOCKS + index
                tl.store(to, entry, mask=index < blocks)
    else:
        sample = (program - token_programs - padded_rows - 1) * BLOCK + lane
        is_sample, is_written = sample < samples, sample < padded_samples
        for column in tl.static_range(3):
            given = columns + 4 * rows + column * samples + sample
            value = tl.load(given, mask=is_sample, other=-1 if column == 1 else 0)
            tl.store(out_samples + column * ROOM_SAMPLES + sample, value, mask=is_written)


@triton.jit
def _row_of(token, ends, rows, is_token, BLOCK: tl.constexpr):
    """Returns [BLOCK]: the first row whose end is after the token."""
    low, high = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32) + rows
    remaining = rows
    while remaining > 0:  # halves the distance of `low` and `high`
        middle = (low + high) // 2
        searching = (low < high) & is_token
        is_before = tl.load(ends + middle, mask=searching, other=0) <= token
        low = tl.where(searching & is_before, middle + 1, low)
        high = tl.where(searching & ~is_before, middle, high)
        remaining = remaining // 2
    return low


@triton.jit(do_not_specialize=["count"])
def _write(token_ids, slots, positions, tokens, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + index, mask=index < count, other=-1)
    is_real = slot >= 0
    position = tl.load(positions + index, mask=is_real, other=0)
    token = tl.load(tokens + index, mask=is_real, other=0)
    tl.store(token_ids + slot * WIDTH + position, token.to(tl.int32), mask=is_real)


class _Gather:
    def __init__(
        self, token_ids: Tensor, block_table: Tensor, block_tokens: int, out: Inputs
    ) -> None:
        assert token_ids.dtype == block_table.dtype == torch.int32
        for tensor in (token_ids, block_table, *out):
            assert tensor.is_contiguous()
        assert out.block_table.shape[1] == block_table.shape[1]
        self._token_ids, self._block_table, self._out = token_ids, block_table, out
        self._block_tokens = block_tokens
        self._pack = ColumnPacker(token_ids, block_table, block_tokens, out)
        size = 4 * len(out.context_tokens) + out.samples.numel()
        self._ring = PinnedRing(size, torch.int64, token_ids.device)

    def __call__(
        self,
        slots: list[int],
        starts: list[int],
        counts: list[int],
        samples: list[int],
        bucket: Bucket | None = None,
    ) -> Sizes:
        sizes, packed = self._pack(slots, starts, counts, samples)
        padded = sizes[:3] if bucket is None else bucket[:3]
        if bucket is not None:
            check_bucket(sizes, bucket)
            check_room(*padded, self._out)
        tokens, rows, drawn = padded
        programs = triton.cdiv(tokens, BLOCK) + rows + 1 + triton.cdiv(drawn, BLOCK)
        out, width = self._out, self._token_ids.shape[1]
        _gather[(programs,)](
            self._ring.copy(packed), self._token_ids, self._block_table, out.input_ids,
            out.positions, out.query_start, out.context_tokens, out.block_table, out.slot_mapping,
            out.samples, *sizes[:3], *padded, -(-sizes.max_context_tokens // self._block_tokens),
            width, self._block_table.shape[1], self._block_tokens, out.samples.shape[1], BLOCK,
            num_warps=4,
        )  # fmt: skip
        return sizes


def make_gather(token_ids: Tensor, block_table: Tensor, block_tokens: int, out: Inputs) -> Gather:
    """See `swell.kernels.inputs.make_gather`."""
    return _Gather(token_ids, block_table, block_tokens, out)


def write_tokens(token_ids: Tensor, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
    """See `swell.kernels.inputs.write_tokens`. Indices are not checked, since the host would have
    to wait for the device."""
    assert token_ids.dtype == torch.int32 and token_ids.is_contiguous()
    slots, positions, tokens = (x.contiguous() for x in (slots, positions, tokens))
    if count := len(slots):
        _write[(triton.cdiv(count, BLOCK),)](
            token_ids, slots, positions, tokens, count, token_ids.shape[1], BLOCK, num_warps=4
        )
