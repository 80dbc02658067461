"""A step's inputs in plain torch; the host's data is copied to the device in one transfer."""

from __future__ import annotations

import torch
from torch import Tensor

from swell.kernels.host.device_copy import to_device
from swell.kernels.host.step_columns import ColumnPacker, check_bucket, check_room
from swell.kernels.inputs import Bucket, Gather, Inputs, Sizes
from swell.kernels.reference.padding import without_padding


class _Gather:
    def __init__(
        self, token_ids: Tensor, block_table: Tensor, block_tokens: int, out: Inputs
    ) -> None:
        self._token_ids, self._block_table, self._out = token_ids, block_table, out
        self._block_tokens = block_tokens
        self._pack = ColumnPacker(token_ids, block_table, block_tokens, out)

    def __call__(
        self,
        slots: list[int],
        starts: list[int],
        counts: list[int],
        samples: list[int],
        bucket: Bucket | None = None,
    ) -> Sizes:
        sizes, packed = self._pack(slots, starts, counts, samples)
        columns = to_device(packed, self._out.samples.device)
        rows, sampling = columns.split([4 * sizes.rows, 3 * sizes.samples])
        self._fill(rows.view(4, -1), sizes)
        self._out.samples[:, : sizes.samples] = sampling.view(3, -1)
        if bucket is not None:
            self._pad(sizes, bucket)
        return sizes

    def _fill(self, columns: Tensor, sizes: Sizes) -> None:
        """columns [4, R] int64, see `StepColumns`"""
        slots, ends, shifts, contexts = columns
        out = self._out
        tokens = torch.arange(sizes.tokens, device=columns.device)
        rows = torch.searchsorted(ends, tokens, right=True)  # [T]: the row of each token
        positions = tokens + shifts[rows]
        blocks = -(-sizes.max_context_tokens // self._block_tokens)
        tables = self._block_table[:, :blocks].index_select(0, slots)
        out.input_ids[: sizes.tokens] = self._token_ids[slots[rows], positions]
        out.positions[: sizes.tokens] = positions
        out.query_start[:1].zero_()  # assigning a number would wait for the device
        out.query_start[1 : sizes.rows + 1] = ends
        out.context_tokens[: sizes.rows] = contexts
        out.block_table[: sizes.rows, :blocks] = tables
        index, offset = positions // self._block_tokens, positions % self._block_tokens
        out.slot_mapping[: sizes.tokens] = tables[rows, index].long() * self._block_tokens + offset

    def _pad(self, sizes: Sizes, bucket: Bucket) -> None:
        check_bucket(sizes, bucket)
        check_room(bucket.tokens, bucket.rows, bucket.samples, self._out)
        out, tokens = self._out, slice(sizes.tokens, bucket.tokens)
        out.input_ids[tokens].zero_()
        out.positions[tokens].zero_()
        out.slot_mapping[tokens].fill_(-1)
        out.query_start[sizes.rows + 1 : bucket.rows + 1].fill_(sizes.tokens)
        out.context_tokens[sizes.rows : bucket.rows].zero_()
        padding = out.samples[:, sizes.samples : bucket.samples]
        padding.zero_()
        padding[1].fill_(-1)


def make_gather(token_ids: Tensor, block_table: Tensor, block_tokens: int, out: Inputs) -> Gather:
    """See `swell.kernels.inputs.make_gather`."""
    return _Gather(token_ids, block_table, block_tokens, out)


def write_tokens(token_ids: Tensor, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
    """See `swell.kernels.inputs.write_tokens`."""
    if not len(slots):
        return
    source, at, writes = without_padding(slots)
    where = at, positions[source]
    token_ids.index_put_(where, torch.where(writes, tokens[source].int(), token_ids[where]))
