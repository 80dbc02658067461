"""A step's inputs compiled from `inputs.cpp`."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from swell.kernels.cpu.capture.recording import INT, POINTER, Function, UnrecordedFunction
from swell.kernels.host.step_columns import check_bucket, check_room, outside
from swell.kernels.inputs import Bucket, Gather, Inputs, Sizes

_INPUTS = ("input_ids", "positions", "slot_mapping", "query_start", "context_tokens", "block_table")


class _Arguments(ctypes.Structure):
    """The struct `GatherArgs` of inputs.cpp."""

    _fields_ = [
        *((name, POINTER) for name in ("columns", "token_ids", "blocks")),
        *((name, INT) for name in ("slots", "width", "max_blocks", "block_tokens")),
        *((name, POINTER) for name in (*_INPUTS, "samples")),
        *((name, INT) for name in ("room_tokens", "room_rows", "room_samples")),
        *((name, INT) for name in ("padded_tokens", "padded_rows", "padded_samples")),
        *((name, INT) for name in ("tokens", "samples_count", "max_query", "max_context")),
    ]

    def pad_to(self, bucket: Bucket) -> None:
        self.padded_tokens, self.padded_rows = bucket.tokens, bucket.rows
        self.padded_samples = bucket.samples


_UNPADDED = Bucket(0, 0, 0, 0)
_gather = UnrecordedFunction("swell_gather_inputs", POINTER, INT, result=INT)
_write = Function(
    "swell_write_tokens",
    "count",
    **dict.fromkeys(("token_ids", "at", "positions", "tokens"), POINTER),
    **dict.fromkeys(("slots", "width", "count", "written"), INT),
)


class _Gather:
    """Gathers each step with one call into the library: addresses do not change between steps."""

    def __init__(
        self, token_ids: Tensor, block_table: Tensor, block_tokens: int, out: Inputs
    ) -> None:
        assert token_ids.dtype == block_table.dtype == torch.int32
        for tensor in (token_ids, block_table, *out):
            assert tensor.is_contiguous()
        rows = len(out.context_tokens)
        self._columns = np.zeros((4, rows), dtype=np.int64)
        self._references = (token_ids, block_table, out)
        self._bucket: Bucket | None = None
        """The sizes to which the last step was padded, which are in `_arguments`."""
        self._arguments = _Arguments(
            self._columns.ctypes.data, token_ids.data_ptr(), block_table.data_ptr(),
            *token_ids.shape, block_table.shape[1], block_tokens,
            *(getattr(out, name).data_ptr() for name in _INPUTS), out.samples.data_ptr(),
            len(out.input_ids), rows, out.samples.shape[1], 0, 0, 0,
        )  # fmt: skip
        assert out.block_table.shape[1] == block_table.shape[1]
        self._address = ctypes.addressof(self._arguments)

    def __call__(
        self,
        slots: list[int],
        starts: list[int],
        counts: list[int],
        samples: list[int],
        bucket: Bucket | None = None,
    ) -> Sizes:
        rows, found, out = len(slots), self._arguments, self._references[2]
        check_room(0, rows, 0, out)
        if bucket != self._bucket:
            padded = bucket or _UNPADDED
            check_room(padded.tokens, padded.rows, padded.samples, out)
            found.pad_to(padded)
            self._bucket = bucket
        self._columns[:, :rows] = (slots, starts, counts, samples)
        done = _gather(self._address, rows)
        check_room(found.tokens, rows, found.samples_count, out)
        if done < rows:
            raise outside(done, slots[done], starts[done], self._references[0])
        sizes = Sizes(found.tokens, rows, found.samples_count, found.max_query, found.max_context)
        if bucket is not None:
            check_bucket(sizes, bucket)
        return sizes


def make_gather(token_ids: Tensor, block_table: Tensor, block_tokens: int, out: Inputs) -> Gather:
    """See `swell.kernels.inputs.make_gather`."""
    return _Gather(token_ids, block_table, block_tokens, out)


def write_tokens(token_ids: Tensor, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
    """See `swell.kernels.inputs.write_tokens`."""
    assert token_ids.dtype == torch.int32 and token_ids.is_contiguous()
    assert slots.dtype == positions.dtype == tokens.dtype == torch.int64
    assert len(slots) == len(positions) == len(tokens)
    slots, positions, tokens = (x.contiguous() for x in (slots, positions, tokens))
    count = len(slots)
    done = _write(
        token_ids.data_ptr(), slots.data_ptr(), positions.data_ptr(), tokens.data_ptr(),
        *token_ids.shape, count, count, used=(token_ids, slots, positions, tokens),
    ).written  # fmt: skip
    if done < count:
        raise IndexError(
            f"slot {slots[done]}, position {positions[done]} is outside the table of tokens"
        )
