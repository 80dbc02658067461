"""A step's inputs compiled from `inputs.cpp`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from swell.kernels.cpu.build import library
from swell.kernels.inputs import Inputs

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class _Tables(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("token_ids", "blocks")),
        *((name, _INT) for name in ("slots", "width", "max_blocks", "block_tokens")),
    ]


class _Inputs(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("input_ids", "positions", "slot_mapping")),
        *((name, _POINTER) for name in ("query_start", "context_tokens", "block_table")),
        *((name, _INT) for name in ("blocks", "table_stride")),
    ]


_gather, _write = library().swell_gather_inputs, library().swell_write_tokens
_gather.argtypes = [*[_POINTER] * 3, _INT, ctypes.POINTER(_Tables), ctypes.POINTER(_Inputs)]
_write.argtypes = [_POINTER, *[_INT] * 2, *[_POINTER] * 3, _INT]
_gather.restype = _write.restype = _INT


def gather_inputs(
    slots: Tensor,
    starts: Tensor,
    query_start: Tensor,
    token_ids: Tensor,
    block_table: Tensor,
    block_tokens: int,
    out: Inputs,
) -> None:
    """See `swell.kernels.inputs.gather_inputs`."""
    assert slots.dtype == starts.dtype == query_start.dtype == torch.int64
    assert token_ids.dtype == block_table.dtype == torch.int32
    for tensor in (slots, starts, query_start, token_ids, block_table):
        assert tensor.is_contiguous()
    tables = _Tables(
        token_ids.data_ptr(), block_table.data_ptr(), *token_ids.shape, block_table.shape[1],
        block_tokens,
    )  # fmt: skip
    inputs = _Inputs(
        out.input_ids.data_ptr(), out.positions.data_ptr(), out.slot_mapping.data_ptr(),
        out.query_start.data_ptr(), out.context_tokens.data_ptr(), out.block_table.data_ptr(),
        out.block_table.shape[1], out.block_table.stride(0),
    )  # fmt: skip
    columns = (slots.data_ptr(), starts.data_ptr(), query_start.data_ptr())
    done = _gather(*columns, len(slots), tables, inputs)
    if done < len(slots):
        raise IndexError(
            f"row {done} of the step: slot {slots[done]} from position {starts[done]} lies outside "
            f"of the tables of {len(token_ids)} slots with {token_ids.shape[1]} tokens each"
        )


def write_tokens(token_ids: Tensor, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
    """See `swell.kernels.inputs.write_tokens`."""
    assert token_ids.dtype == torch.int32 and token_ids.is_contiguous()
    assert slots.dtype == positions.dtype == tokens.dtype == torch.int64
    assert len(slots) == len(positions) == len(tokens)
    slots, positions, tokens = (x.contiguous() for x in (slots, positions, tokens))
    done = _write(
        token_ids.data_ptr(), *token_ids.shape, slots.data_ptr(), positions.data_ptr(),
        tokens.data_ptr(), len(slots),
    )  # fmt: skip
    if done < len(slots):
        raise IndexError(
            f"there is no place for a token at slot {slots[done]}, position {positions[done]}"
        )
