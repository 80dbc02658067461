"""Products compiled from `linear.cpp` and `quantized.cpp`; weights are packed in panels of
neighbouring outputs."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from swell.kernels.cpu.build import TYPES
from swell.kernels.cpu.capture.recording import INT, POINTER, Function, UnrecordedFunction
from swell.kernels.linear import FloatWeight, PackedTensor, Weight
from swell.kernels.reference import linear as reference
from swell.kernels.weights.quantized import (
    INTEGERS,
    Numbers,
    PackedQuantizedTensor,
    QuantizedTensor,
)

_linear = Function(
    "swell_linear",
    "rows",
    **dict.fromkeys(("x", "w", "bias", "y"), POINTER),
    **dict.fromkeys(("rows", "size", "outs", "x_stride", "is_bf16"), INT),
)
_linear_argmax = Function(
    "swell_linear_argmax",
    "rows",
    **dict.fromkeys(("x", "w", "values", "which"), POINTER),
    **dict.fromkeys(("rows", "size", "outs", "x_stride", "is_bf16"), INT),
)
_embedding = Function(
    "swell_embedding",
    "tokens",
    **dict.fromkeys(("ids", "w", "y"), POINTER),
    **dict.fromkeys(("tokens", "size", "panel", "is_bf16"), INT),
)


def _check_ids(found: Any) -> None:
    """`found`: the struct `TableRowsArgs`."""
    if found.outside:
        raise IndexError(f"index {found.id} is out of range: the table has {found.count} rows")


_table_rows = Function(
    "swell_table_rows",
    "tokens",
    _check_ids,
    **dict.fromkeys(("ids", "rows", "current"), POINTER),
    **dict.fromkeys(("tokens", "wraps", "count", "outside", "id"), INT),
)
_local_ids = Function(
    "swell_local_ids",
    "tokens",
    **dict.fromkeys(("ids", "local"), POINTER),
    **dict.fromkeys(("tokens", "start", "count"), INT),
)
_zero_rows = Function(
    "swell_zero_rows",
    "tokens",
    **dict.fromkeys(("ids", "y"), POINTER),
    **dict.fromkeys(("tokens", "start", "count", "row_bytes"), INT),
)
_pick_largest = Function(
    "swell_pick_largest",
    "rows",
    **dict.fromkeys(("values", "indices", "largest", "which"), POINTER),
    **dict.fromkeys(("rows", "parts", "part"), INT),
)
_QUANTIZED = {
    **dict.fromkeys(("x", "w", "bias", "y", "which"), POINTER),
    **dict.fromkeys(("rows", "size", "outs", "x_stride", "is_bf16"), INT),
    **dict.fromkeys(("bits", "group", "has_mins", "wide_scales", "integers"), INT),
}
"""The struct `QuantizedArgs` of quantized.h."""
_quantized_linear = Function("swell_quantized_linear", "rows", **_QUANTIZED)
_quantized_linear_argmax = Function("swell_quantized_linear_argmax", "rows", **_QUANTIZED)
_quantized_embedding = Function("swell_quantized_embedding", "rows", **_QUANTIZED)
PANEL = UnrecordedFunction("swell_linear_panel", result=INT)()
"""The number of outputs of one panel."""
_numerics = UnrecordedFunction("swell_numerics", result=ctypes.c_char_p)


def pack(weight: Tensor, exact: bool = False) -> FloatWeight:
    """Returns a copy: float32 as [out / PANEL, in, PANEL], bfloat16 as [out / PANEL, in / 2, PANEL,
    2]; see `swell.kernels.linear.pack`."""
    if weight.dtype not in TYPES:
        return weight
    outs, size = weight.shape
    if weight.dtype == torch.float32:
        return PackedTensor(_in_panels(weight), outs, size)
    if size % 2 or weight.storage_offset() % 2:  # a copy is needed to read pairs
        weight = functional.pad(weight, (0, size % 2))
    data = (
        _in_panels(weight.contiguous().view(torch.int32))
        .view(torch.bfloat16)
        .unflatten(2, (PANEL, 2))
    )
    return PackedTensor(data, outs, size)


def _in_panels(weight: Tensor) -> Tensor:
    """[out, in] -> a copy [out / PANEL, in, PANEL], padded with zeros."""
    outs, size = weight.shape
    panels = -(-outs // PANEL)
    data = weight.new_zeros(panels, size, PANEL)
    whole = outs // PANEL
    data[:whole].copy_(weight[: whole * PANEL].unflatten(0, (whole, PANEL)).transpose(1, 2))
    if whole < panels:
        data[whole, :, : outs - whole * PANEL] = weight[whole * PANEL :].T
    return data


def pack_quantized(
    weight: QuantizedTensor, dtype: torch.dtype, rounded_activations: bool = False
) -> PackedQuantizedTensor:
    """See `swell.kernels.linear.pack_quantized`."""
    assert weight.numbers in numbers(), weight.numbers
    return PackedQuantizedTensor.pack(weight, PANEL, dtype, rounded_activations)


def numbers() -> frozenset[Numbers]:
    """See `swell.kernels.linear.numbers`."""
    return INTEGERS


def panel() -> int:
    """See `swell.kernels.linear.panel`."""
    return int(PANEL)


def numerics() -> str:
    """See `swell.kernels.linear.numerics`."""
    name: bytes = _numerics()
    return name.decode()


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """See `swell.kernels.linear.linear`."""
    if isinstance(weight, Tensor) or weight.dtype not in TYPES:
        return reference.linear(x, weight, bias)
    data, outs, size = weight.data, weight.out_features, weight.in_features
    assert x.shape[-1] == size and x.dtype == weight.dtype, (x.shape, x.dtype)
    if x.dim() != 2 or x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((*x.shape[:-1], outs), dtype=x.dtype)
    used = (x, data, out) if bias is None else (x, data, out, bias)
    pointers = x.data_ptr(), data.data_ptr(), None if bias is None else bias.data_ptr()
    x_stride = x.stride(0) if x.dim() == 2 else size
    sizes = out.numel() // outs, size, outs, x_stride, x.dtype == torch.bfloat16
    if isinstance(weight, PackedTensor):
        _linear(*pointers, out.data_ptr(), *sizes, used=used)
    else:
        _quantized_linear(*pointers, out.data_ptr(), None, *sizes, *members_of(weight), used=used)
    return out


def linear_argmax(x: Tensor, weight: Weight, outs: int) -> tuple[Tensor, Tensor]:
    """See `swell.kernels.linear.linear_argmax`; the outputs themselves are not written."""
    if isinstance(weight, Tensor) or weight.dtype not in TYPES:
        return reference.linear_argmax(x, weight, outs)
    data, size = weight.data, weight.in_features
    assert 0 < outs <= weight.out_features, (outs, weight.out_features)
    assert x.dim() == 2 and x.shape[1] == size and x.dtype == weight.dtype, (x.shape, x.dtype)
    if x.stride(1) != 1:
        x = x.contiguous()
    values, which = torch.empty(len(x)), torch.empty(len(x), dtype=torch.int64)
    used = x, data, values, which
    results = values.data_ptr(), which.data_ptr()
    sizes = len(x), size, outs, x.stride(0), x.dtype == torch.bfloat16
    if isinstance(weight, PackedTensor):
        _linear_argmax(x.data_ptr(), data.data_ptr(), *results, *sizes, used=used)
    else:
        _quantized_linear_argmax(
            x.data_ptr(), data.data_ptr(), None, *results, *sizes, *members_of(weight), used=used
        )
    return values, which


def embedding(ids: Tensor, weight: Weight) -> Tensor:
    """See `swell.kernels.linear.embedding`."""
    if weight.dtype not in TYPES:
        return reference.embedding(ids, weight)
    return gather(table_rows(ids, _num_rows(weight)), weight)


def table_rows(
    ids: Tensor, count: int, *, wraps: bool = False, current: int | None = None
) -> Tensor:
    """Returns the rows of a table that `ids` select, int64. `wraps`: negative ids count from the
    end. `count`: the number of rows; `current`: the address of the int64 that is their number in a
    replay, if it changes.

    Raises `IndexError` for an id outside the table; a replay that finds one does so at its end.
    """
    ids = _as_int64(ids)
    rows = torch.empty_like(ids)
    pointers = ids.data_ptr(), rows.data_ptr(), current
    _table_rows(*pointers, ids.numel(), wraps, count, 0, 0, used=(ids, rows))
    return rows


def _num_rows(weight: Weight) -> int:
    return len(weight) if isinstance(weight, Tensor) else weight.out_features


def _as_int64(ids: Tensor) -> Tensor:
    if ids.dtype == torch.int64 and ids.is_contiguous():
        return ids
    return ids.to(torch.int64).contiguous()


def gather(rows: Tensor, weight: Weight) -> Tensor:
    """Returns the rows of a matrix with these indices, which are inside it."""
    if isinstance(weight, Tensor):
        data, size, panel = weight, weight.shape[1], 1
    else:
        data, size, panel = weight.data, weight.in_features, PANEL
    assert data.is_contiguous()
    out = torch.empty((*rows.shape, size), dtype=weight.dtype)
    is_bf16, used = weight.dtype == torch.bfloat16, (rows, data, out)
    pointers = rows.data_ptr(), data.data_ptr()
    if isinstance(weight, PackedQuantizedTensor):
        sizes = rows.numel(), size, weight.out_features, 1, is_bf16
        _quantized_embedding(
            *pointers, None, out.data_ptr(), None, *sizes, *members_of(weight), used=used
        )
    else:
        _embedding(*pointers, out.data_ptr(), rows.numel(), size, panel, is_bf16, used=used)
    return out


def embedding_part(ids: Tensor, weight: Weight, start: int) -> Tensor:
    """See `swell.kernels.linear.embedding_part`."""
    if weight.dtype not in TYPES:
        return reference.embedding_part(ids, weight, start)
    ids = _as_int64(ids)
    local = torch.empty_like(ids)
    place = ids.numel(), start, _num_rows(weight)
    _local_ids(ids.data_ptr(), local.data_ptr(), *place, used=(ids, local))
    found = gather(local, weight)
    row_bytes = found.shape[-1] * found.itemsize
    _zero_rows(ids.data_ptr(), found.data_ptr(), *place, row_bytes, used=(ids, found))
    return found


def pick_largest(values: Tensor, indices: Tensor, part: int) -> tuple[Tensor, Tensor]:
    """See `swell.kernels.linear.pick_largest`."""
    rows, parts = values.shape
    values, indices = values.contiguous(), indices.contiguous()
    largest, which = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    _pick_largest(
        values.data_ptr(), indices.data_ptr(), largest.data_ptr(), which.data_ptr(),
        rows, parts, part, used=(values, indices, largest, which),
    )  # fmt: skip
    return largest, which


def members_of(weight: PackedQuantizedTensor) -> tuple[int, ...]:
    """Returns the last members of `QuantizedArgs`."""
    form = weight.form
    wide_scales = form.scale_type == torch.float32
    return form.bits, form.group, form.has_mins, wide_scales, weight.rounded_activations
