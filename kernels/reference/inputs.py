"""A step's inputs in plain torch; the host's data is copied to the device in one transfer."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from swell.kernels.device_copy import to_device
from swell.kernels.inputs import Bucket, Gather, Inputs, Sizes, check_bucket, check_room, outside
from swell.kernels.reference.padding import without_padding


class _Gather:
    def __init__(
        self, token_ids: Tensor, block_table: Tensor, block_tokens: int, out: Inputs
    ) -> None:
        self._token_ids, self._block_table, self._out = token_ids, block_table, out
        self._block_tokens = block_tokens

    def __call__(
        self,
        slots: list[int],
        starts: list[int],
        counts: list[int],
        samples: list[int],
        bucket: Bucket | None = None,
    ) -> Sizes:
        check_room(sum(counts), len(slots), sum(samples), self._out)
        columns = np.array([slots, starts, counts, samples], dtype=np.int64)
        self._check(columns)
        slots_np, starts_np, counts_np, samples_np = columns
        ends_np, context_np = counts_np.cumsum(), starts_np + counts_np
        sample_rows = np.repeat(np.arange(len(slots)), samples_np)
        # [S]: how many sampled positions of the row follow
        back_np = samples_np.cumsum()[sample_rows] - 1 - np.arange(len(sample_rows))
        sampling_np = (
            ends_np[sample_rows] - 1 - back_np,
            slots_np[sample_rows],
            context_np[sample_rows] - back_np,
        )
        sizes = Sizes(
            tokens=int(counts_np.sum()),
            rows=len(slots),
            samples=len(sample_rows),
            max_query_tokens=int(counts_np.max(initial=0)),
            max_context_tokens=int(context_np.max(initial=0)),
        )
        packed = to_device(
            np.concatenate((slots_np, starts_np, counts_np, *sampling_np)), self._out.samples.device
        )
        rows, sampling = packed.split([3 * sizes.rows, 3 * sizes.samples])
        self._fill(rows.view(3, -1), sizes)
        self._out.samples[:, : sizes.samples] = sampling.view(3, -1)
        if bucket is not None:
            self._pad(sizes, bucket)
        return sizes

    def _check(self, columns: np.ndarray) -> None:
        slots, starts, counts, samples = columns
        table, length = self._token_ids.shape
        room = self._block_table.shape[1] * self._block_tokens
        inside = (slots >= 0) & (slots < table) & (starts >= 0) & (counts >= 0)
        inside &= (starts + counts + (samples > 0) <= length) & (starts + counts <= room)
        inside &= samples <= counts.clip(1)
        if not inside.all():
            row = int(inside.argmin())
            raise outside(row, int(slots[row]), int(starts[row]), self._token_ids)

    def _fill(self, columns: Tensor, sizes: Sizes) -> None:
        """columns [3, R] int64: slots, starts, counts"""
        slots, starts, counts = columns
        out, device = self._out, columns.device
        ends = counts.cumsum(0)
        # [T]: the row of each token
        rows = torch.arange(sizes.rows, device=device).repeat_interleave(
            counts, output_size=sizes.tokens
        )
        positions = torch.arange(sizes.tokens, device=device) + (starts - ends + counts)[rows]
        blocks = -(-sizes.max_context_tokens // self._block_tokens)
        tables = self._block_table[:, :blocks].index_select(0, slots)
        out.input_ids[: sizes.tokens] = self._token_ids[slots[rows], positions]
        out.positions[: sizes.tokens] = positions
        out.query_start[:1].zero_()  # assigning a number would wait for the device
        out.query_start[1 : sizes.rows + 1] = ends
        out.context_tokens[: sizes.rows] = starts + counts
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
