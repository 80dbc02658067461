"""Operations of torch by which routers choose experts, compiled from `choices.cpp` and
`linear.cpp`.

They are computed for the last dimension of contiguous tensors. `rows` and `vectors`: the numbers of
rows and of vectors in each; `has_rows`: whether a replay may have another number of rows.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from swell.kernels.cpu.capture.recording import INT, POINTER, Function

_topk = Function(
    "swell_topk",
    "rows",
    **dict.fromkeys(("x", "values", "indices"), POINTER),
    **dict.fromkeys(("rows", "vectors", "count", "k", "is_bf16"), INT),
)


def _check_indices(found: Any) -> None:
    """`found`: the struct `ColumnsArgs`."""
    if found.outside:
        raise IndexError(f"index {found.id} is out of bounds: a vector has {found.count} elements")


_columns = Function(
    "swell_columns",
    "rows",
    _check_indices,
    **dict.fromkeys(("x", "indices", "out"), POINTER),
    **dict.fromkeys(("rows", "vectors", "count", "k", "item_bytes", "value", "outside", "id"), INT),
)
_product = Function(
    "swell_plain_linear",
    "rows",
    **dict.fromkeys(("x", "w", "y"), POINTER),
    **dict.fromkeys(("rows", "size", "outs", "x_stride", "is_bf16"), INT),
)


def topk(
    x: Tensor, values: Tensor, indices: Tensor, rows: int, vectors: int, *, has_rows: bool
) -> None:
    """Sets `values` to the largest elements of each vector of x, in descending order, and `indices`
    to their places."""
    _topk(
        x.data_ptr(), values.data_ptr(), indices.data_ptr(),
        rows, vectors, x.shape[-1], values.shape[-1], x.dtype == torch.bfloat16,
        used=(x, values, indices), has_rows=has_rows,
    )  # fmt: skip


def gather(
    x: Tensor, indices: Tensor, out: Tensor, rows: int, vectors: int, *, has_rows: bool
) -> None:
    """Sets `out` to the elements of x with these indices."""
    _columns(
        x.data_ptr(), indices.data_ptr(), out.data_ptr(),
        rows, vectors, x.shape[-1], indices.shape[-1], x.element_size(), 0, 0, 0,
        used=(x, indices, out), has_rows=has_rows,
    )  # fmt: skip


def scatter(
    x: Tensor, indices: Tensor, value: float, rows: int, vectors: int, *, has_rows: bool
) -> None:
    """Sets the elements of x with these indices to `value`, which x's type represents."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    if x.dtype == torch.bfloat16:
        assert not bits & 0xFFFF, value
        bits >>= 16
    _columns(
        x.data_ptr(), indices.data_ptr(), None,
        rows, vectors, x.shape[-1], indices.shape[-1], x.element_size(),
        bits, 0, 0,
        used=(x, indices), has_rows=has_rows,
    )  # fmt: skip


def product(x: Tensor, weight: Tensor, out: Tensor, *, has_rows: bool) -> None:
    """Sets out [rows, outs] = x [rows, size] times weight [outs, size], transposed."""
    _product(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(),
        len(x), x.shape[1], len(weight), x.stride(0), x.dtype == torch.bfloat16,
        used=(x, weight, out), has_rows=has_rows,
    )  # fmt: skip
