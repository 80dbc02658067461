"""Operations on elements and reductions of strided tensors, compiled from `pointwise.cpp`.

A captured step repeats torch's own operations by these calls (see `torch_operations.py`). One
dimension of the tensors may be the one of the step's rows; the calls compute its first elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swell.kernels.cpu.capture.recording import INT, POINTER, Function
from swell.kernels.graph import NotCapturableError

OPERATIONS = (
    *("copy", "add", "sub", "mul", "div", "maximum", "minimum", "pow", "floor_divide"),
    *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not"),
    *("where", "clamp", "neg", "abs", "square", "sqrt", "rsqrt", "reciprocal"),
    *("exp", "expm1", "log", "log1p", "sin", "cos", "tanh", "sigmoid", "silu", "relu"),
    *("softplus", "gelu", "gelu_tanh", "erf"),
)
"""In the order of the enumeration in pointwise.cpp."""
REDUCTIONS = ("sum", "mean", "amax", "softmax")
TYPES = (*(torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.float64),)
"""In the order of the enumeration in pointwise.cpp."""

_STRIDES = ("row", "outer", "middle", "inner")
_SIZES = ("rows", "outer", "middle", "inner")


def _operand(name: str) -> dict[str, type]:
    return dict.fromkeys((f"{name}_{part}" for part in ("type", *_STRIDES)), INT)


_pointwise = Function(
    "swell_pointwise",
    "rows",
    **dict.fromkeys(("a", "b", "c", "out"), POINTER),
    **dict.fromkeys((*_SIZES, "operation", "is_wide"), INT),
    **_operand("of_a"), **_operand("of_b"), **_operand("of_c"), **_operand("of_out"),
)  # fmt: skip
_reduction = Function(
    "swell_reduction",
    "rows",
    **dict.fromkeys(("x", "out"), POINTER),
    **dict.fromkeys((*_SIZES, "operation"), INT),
    **_operand("of_x"), **_operand("of_out"),
)  # fmt: skip


def pointwise(operation: str, operands: Sequence[Tensor], out: Tensor, row: int | None) -> None:
    """Sets out = operation(*operands), which are broadcast to its shape. `row`: the dimension of
    `out` whose size is the number of rows; None: there is none."""
    types = [t.dtype for t in (*operands, out)]
    is_wide = torch.float64 in types[:-1] and any(
        t.dtype == torch.float64 and t.dim() for t in operands
    )
    is_wide |= not any(t.dtype.is_floating_point for t in (*operands, out) if t.dim())
    operands = [t.expand(out.shape) for t in operands]
    sizes, strides = _four_dimensions([*operands, out], row)
    missing = [None] * (3 - len(operands))
    of_missing = [0] * 5 * len(missing)
    *of_operands, of_out = ([_code(kind), *each] for kind, each in zip(types, strides, strict=True))
    _pointwise(
        *(t.data_ptr() for t in operands), *missing, out.data_ptr(), *sizes,
        OPERATIONS.index(operation), is_wide,
        *(number for each in of_operands for number in each), *of_missing, *of_out,
        used=(*operands, out), has_rows=row is not None,
    )  # fmt: skip


def reduction(operation: str, x: Tensor, out: Tensor, dim: int, row: int | None) -> None:
    """Sets `out` to the reduction of x over its dimension `dim`; out has x's dimensions. `row`: the
    dimension whose size is the number of rows; None: there is none."""
    moved, to = x.movedim(dim, -1), out.movedim(dim, -1).expand(x.movedim(dim, -1).shape)
    if row is not None:
        dim = dim % x.dim()
        assert row != dim
        row -= row > dim
    sizes, strides = _four_dimensions([moved, to], row, keeps_last=True)
    _reduction(
        x.data_ptr(), out.data_ptr(), *sizes, REDUCTIONS.index(operation),
        _code(x.dtype), *strides[0], _code(out.dtype), *strides[1],
        used=(x, out), has_rows=row is not None,
    )  # fmt: skip


def _code(kind: torch.dtype) -> int:
    if kind not in TYPES:
        raise NotCapturableError(f"a replay cannot compute {kind}")
    return TYPES.index(kind)


def _four_dimensions(
    tensors: Sequence[Tensor], row: int | None, keeps_last: bool = False
) -> tuple[list[int], list[list[int]]]:
    """Returns the sizes and strides of tensors of one shape as [rows, outer, middle, inner]:
    dimensions whose elements follow one another in all tensors are merged. Without rows, any
    dimension may be the first. `keeps_last`: the last dimension becomes the inner one and is not
    merged."""
    shape = tensors[0].shape
    merged: list[tuple[int, list[int]]] = []
    last = len(shape) - 1
    for i in range(len(shape)):
        is_kept = keeps_last and i == last
        if i == row or (shape[i] == 1 and not is_kept):
            continue
        strides = [t.stride(i) for t in tensors]
        if merged and not is_kept:
            size, outer = merged[-1]
            if all(a == b * shape[i] for a, b in zip(outer, strides, strict=True)):
                merged[-1] = size * shape[i], strides
                continue
        merged.append((shape[i], strides))
    most = 4 if row is None else 3
    if len(merged) > most:
        raise NotCapturableError(f"a replay cannot compute the shape {list(shape)}")
    merged = [(1, [0] * len(tensors))] * (most - len(merged)) + merged
    if row is not None:
        merged.insert(0, (shape[row], [t.stride(row) for t in tensors]))
    sizes = [size for size, _ in merged]
    return sizes, [[strides[i] for _, strides in merged] for i in range(len(tensors))]
