"""The operations of torch that a recording of the CPU backend repeats.

    VIEWS, MAKERS   run while a step is recorded, and need not be repeated
    LOOKUPS         select rows of a table, each of whose ids is checked
    COMPOSED        are other operations of torch or of this backend, which are recorded
    CHOICES         are recorded as calls of `choices.cpp` and `linear.cpp`
    POINTWISE       are recorded as calls of `pointwise.cpp`; so are REDUCTIONS
    anything else   is decomposed by torch, or refused

A recording computes any number of rows up to that of the capture. So an operation is recorded only
if the rows are one dimension of its result, which its size tells, and each row depends on the same
row of the operands. Operations on constants, such as parameters, are repeated as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swell.kernels.cpu import build, linear, norm
from swell.kernels.cpu.capture import choices
from swell.kernels.cpu.capture import pointwise as compiled
from swell.kernels.cpu.capture.recording import Recording
from swell.kernels.graph import NotCapturableError

MAKERS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
VIEWS = {
    *("alias", "as_strided", "detach", "expand", "narrow", "permute", "select", "slice", "split"),
    *("split_with_sizes", "squeeze", "t", "transpose", "unbind", "unflatten", "unsqueeze"),
    *("view", "_unsafe_view", "lift_fresh"),
}


class Step:
    """The tensors of one recording."""

    def __init__(self, recording: Recording, sizes: tuple[int, ...]) -> None:
        """`sizes`: the numbers of rows."""
        self.recording, self._sizes = recording, sizes
        self.made: list[Tensor] = []
        """The tensors that were made during the recording."""
        self._is_constant: dict[int, bool] = {}
        """The storage of each of them -> whether it is a constant."""

    def make(self, like: Tensor, operands: Sequence[Tensor]) -> Tensor:
        """Returns a new tensor with the sizes, strides and type of `like`, for the result of an
        operation on `operands`."""
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        self.add(made, all(map(self.is_constant, operands)))
        return made

    def add(self, made: Tensor, is_constant: bool = False) -> None:
        """Registers a tensor that was made during the recording."""
        self.made.append(made)
        self._is_constant[_storage(made)] = is_constant

    def is_made(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self._is_constant

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor is the same in each step: it was made from constants only, or before the
        recording, and is not one of the step's inputs, which are integers of rows."""
        made = self._is_constant.get(_storage(tensor))
        if made is not None:
            return made
        return tensor.is_floating_point() or not self.sizes_in(tensor)

    def sizes_in(self, tensor: Tensor) -> set[int]:
        """Returns the sizes of dimensions that may be numbers of rows."""
        return {*self._sizes} & {*tensor.shape}

    def row(self, result: Tensor, operands: Sequence[Tensor]) -> int | None:
        """Returns the dimension of the rows in the result of an operation whose operands are
        broadcast to its shape; None: the result is constant."""
        changing = [t for t in operands if not self.is_constant(t)]
        if not changing:
            if self.is_constant(result) or not self.sizes_in(result):
                return None
            changing = [result]
        rows = {self._rows(t) for t in changing}
        size = rows.pop()
        if rows or result.shape.count(size) != 1:
            raise NotCapturableError(f"the shape {list(result.shape)} does not tell its rows")
        dim = [*result.shape].index(size)
        for each in changing:
            own = dim - result.dim() + each.dim()
            if own < 0 or each.shape[own] != size:
                raise NotCapturableError("a row of a result depends on several rows")
        return dim

    def current_rows(self, table: Tensor) -> int | None:
        """Returns the address of a table's number of rows in a replay; None: it does not change."""
        if self.is_constant(table):
            return None
        rows = self._rows(table)
        if len(table) != rows:
            raise NotCapturableError("a selection of columns")
        return self.recording.address_of_current(rows)

    def _rows(self, tensor: Tensor) -> int:
        """Returns the number of rows of a tensor that is not constant."""
        known = self.recording.rows.get(_storage(tensor)) if self.is_made(tensor) else None
        if known is not None:
            return known
        sizes = self.sizes_in(tensor)
        if len(sizes) != 1:
            raise NotCapturableError(f"the shape {list(tensor.shape)} does not tell its rows")
        return sizes.pop()


class UnrecordedStep(Step):
    """A step whose operations run at once, on tensors of any size."""

    def __init__(self) -> None:
        super().__init__(Recording(()), ())

    def add(self, made: Tensor, is_constant: bool = False) -> None:
        pass

    def is_made(self, tensor: Tensor) -> bool:
        return True

    def row(self, result: Tensor, operands: Sequence[Tensor]) -> None:
        return None

    def current_rows(self, table: Tensor) -> None:
        return None


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _add(operation: str) -> Callable[..., tuple[Any, ...]]:
    return lambda a, b, alpha=1: (operation, a, b) if alpha == 1 else (operation, a, b, alpha)


def _pow(a: Any, b: Any) -> tuple[Any, ...]:
    return ("square", a) if not isinstance(b, Tensor) and b == 2 else ("pow", a, b)


def _div(a: Any, b: Any, rounding_mode: str | None = None) -> tuple[Any, ...]:
    if rounding_mode not in (None, "floor"):
        raise NotCapturableError(f"torch's div with {rounding_mode=}")
    return ("floor_divide" if rounding_mode else "div", a, b)


def _clamp(a: Any, min: Any = None, max: Any = None) -> tuple[Any, ...]:
    return ("clamp", a, math.nan if min is None else min, math.nan if max is None else max)


def _bitwise(operation: str) -> Callable[..., tuple[Any, ...]]:
    def of(*operands: Any) -> tuple[Any, ...]:
        if any(isinstance(t, Tensor) and t.dtype != torch.bool for t in operands):
            raise NotCapturableError("torch's bitwise operations on integers")
        return (operation, *operands)

    return of


_SAME = (
    *("mul", "maximum", "minimum", "floor_divide", "eq", "ne", "lt", "le", "gt", "ge", "where"),
    *("logical_and", "logical_or", "logical_not", "neg", "abs", "sqrt", "rsqrt", "reciprocal"),
    *("exp", "expm1", "log", "log1p", "sin", "cos", "tanh", "sigmoid", "silu", "relu", "erf"),
)
POINTWISE: dict[str, Callable[..., tuple[Any, ...]]] = {
    **{name: lambda *operands, name=name: (name, *operands) for name in _SAME},
    "add": _add("add"),
    "sub": _add("sub"),
    "rsub": lambda a, b, alpha=1: _add("sub")(b, a, alpha),
    "div": _div,
    "pow": _pow,
    "clamp": _clamp,
    "clamp_min": lambda a, bound: _clamp(a, bound),
    "clamp_max": lambda a, bound: _clamp(a, None, bound),
    "masked_fill": lambda a, mask, value: ("where", mask, value, a),
    "bitwise_and": _bitwise("logical_and"),
    "bitwise_or": _bitwise("logical_or"),
    "bitwise_not": _bitwise("logical_not"),
    "gelu": lambda a, approximate="none": ("gelu" if approximate == "none" else "gelu_tanh", a),
    "softplus": lambda a, beta=1, threshold=20: ("softplus", a, beta, threshold),
    "_to_copy": lambda a, **_: ("copy", a),
    "clone": lambda a, **_: ("copy", a),
    "copy": lambda _, source, *__: ("copy", source),
    "fill": lambda _, value: ("copy", value),
    "zero": lambda _: ("copy", 0),
}
"""The name of an operation -> a function of its arguments that returns a name of `compiled` and the
operands. The name of an operation in place ends with an underscore."""

REDUCTIONS = {"sum": "sum", "mean": "mean", "amax": "amax", "_softmax": "softmax"}
"""The name of an operation -> the name of `compiled`."""


def record_pointwise(step: Step, func: Any, args: Any, kwargs: Any) -> Tensor:
    """Records an operation on elements, or runs it if the step is not recorded. Returns its
    result."""
    name = func.overloadpacket.__name__
    in_place = name.endswith("_")
    arrange = POINTWISE[name.removesuffix("_") if in_place else name]
    operation, *given = arrange(*args, **kwargs)
    operands = [
        each if isinstance(each, Tensor) else torch.tensor(each, dtype=torch.float64)
        for each in given
    ]
    if in_place:
        out = args[0]
        if not step.is_made(out):
            raise NotCapturableError(f"torch's {name} changes a tensor of the model")
    else:
        out = step.make(_on_meta(func, args, kwargs), operands)
    if out.dtype == torch.bfloat16 and operation != "where":
        for each in operands:
            if operation != "copy" and each.dim() and not each.dtype.is_floating_point:
                raise NotCapturableError(f"torch's {name} on integers and bfloat16")
    compiled.pointwise(operation, operands, out, step.row(out, operands))
    step.recording.note_torch(name, is_arithmetic=operation != "copy")
    return out


def record_reduction(step: Step, func: Any, args: Any, kwargs: Any) -> Tensor:
    """Records a reduction over one dimension, or runs it if the step is not recorded. Returns its
    result."""
    name = func.overloadpacket.__name__
    x, dims = args[0], args[1] if len(args) > 1 else kwargs.get("dim")
    if isinstance(dims, int):
        dims = [dims]
    if not dims or len(dims) != 1 or not x.is_floating_point():
        raise NotCapturableError(f"torch's {name} of several dimensions, or of integers")
    dim = dims[0] % x.dim()
    out = step.make(_on_meta(func, args, kwargs), [x])
    row = step.row(x, [x])
    if row == dim:
        raise NotCapturableError(f"torch's {name} of several rows")
    kept = out if out.dim() == x.dim() else out.unsqueeze(dim)
    compiled.reduction(REDUCTIONS[name], x, kept, dim, row)
    step.recording.note_torch(name, is_arithmetic=True)
    return out


def _topk(
    step: Step, func: Any, x: Tensor, k: int, dim: int = -1, largest: bool = True, *_: Any
) -> tuple[Tensor, Tensor]:
    if not largest or x.dtype not in build.TYPES:
        raise NotCapturableError("torch's topk of this form")
    like = _on_meta(func, (x, k, dim), {})
    values, indices = (step.make(each, [x]) for each in like)
    places = _vectors(step, values, [x], dim)
    choices.topk(_contiguous(step, x), values, indices, *places[:2], has_rows=places.has_rows)
    step.recording.note_torch("topk", is_arithmetic=True)
    return values, indices


def _gather(step: Step, func: Any, x: Tensor, dim: int, indices: Tensor, **_: Any) -> Tensor:
    if x.shape[:-1] != indices.shape[:-1]:
        raise NotCapturableError("torch's gather from several rows")
    out = step.make(_on_meta(func, (x, dim, indices), {}), [x, indices])
    places = _vectors(step, out, [x, indices], dim)
    x, indices = _contiguous(step, x), _contiguous(step, indices)
    choices.gather(x, indices, out, *places[:2], has_rows=places.has_rows)
    step.recording.note_torch("gather", is_arithmetic=False)
    return out


def _scatter(step: Step, func: Any, x: Tensor, dim: int, indices: Tensor, value: Any) -> Tensor:
    is_number = isinstance(value, int | float) and float(value).is_integer() and abs(value) < 256
    if not is_number or x.dtype not in build.TYPES or not x.is_contiguous():
        raise NotCapturableError("torch's scatter_ of this form")
    if not step.is_made(x) or x.shape[:-1] != indices.shape[:-1]:
        raise NotCapturableError("torch's scatter_ to several rows, or to a tensor of the model")
    places = _vectors(step, x, [x, indices], dim)
    choices.scatter(x, _contiguous(step, indices), value, *places[:2], has_rows=places.has_rows)
    step.recording.note_torch("scatter_", is_arithmetic=False)
    return x


def _mm(step: Step, func: Any, x: Tensor, weight: Tensor) -> Tensor:
    is_product = step.is_constant(weight) and weight.T.is_contiguous()
    if not is_product or x.dtype != weight.dtype or x.dtype not in build.TYPES:
        raise NotCapturableError("a product of two tensors that are not a weight and its inputs")
    out = step.make(_on_meta(func, (x, weight), {}), [x, weight])
    row = step.row(out, [x])
    if row == 1:
        raise NotCapturableError("a product of several rows")
    x = x if x.stride(1) == 1 else _contiguous(step, x)
    choices.product(x, weight.T, out, has_rows=row is not None)
    step.recording.note_torch("mm", is_arithmetic=True)
    return out


CHOICES: dict[str, Callable[..., Any]] = {
    "topk": _topk,
    "gather": _gather,
    "scatter_": _scatter,
    "mm": _mm,
}
"""The name of an operation of routers -> a function of the step, the operation and its arguments
that records it, or runs it if the step is not recorded, and returns its result."""


def _contiguous(step: Step, x: Tensor) -> Tensor:
    """Returns x, or records a copy of it."""
    if x.is_contiguous():
        return x
    copied = step.make(torch.empty(x.shape, dtype=x.dtype, device="meta"), [x])
    compiled.pointwise("copy", [x], copied, step.row(copied, [x]))
    return copied


class _Vectors(NamedTuple):
    """The vectors of a tensor's last dimension."""

    rows: int
    of_row: int
    has_rows: bool


def _vectors(step: Step, result: Tensor, operands: Sequence[Tensor], dim: int) -> _Vectors:
    """Returns the vectors of an operation over the dimension `dim`, which must be the last one."""
    if dim % result.dim() != result.dim() - 1:
        raise NotCapturableError("a choice among several vectors")
    row, outer = step.row(result, operands), result.shape[:-1]
    if row is None:
        return _Vectors(math.prod(outer), 1, False)
    if row == len(outer) or math.prod(outer[:row]) != 1:
        raise NotCapturableError("a choice among several rows")
    return _Vectors(outer[row], math.prod(outer[row + 1 :]), True)


def _on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the result of an operation without its values."""
    names = tuple(name for name in kwargs if name not in ("device", "layout", "pin_memory"))
    values = [*args, *(kwargs[name] for name in names)]
    return _result_on_meta(func, names, *map(_without_values, values))


class _Form(NamedTuple):
    """A tensor without its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def _without_values(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return _Form(argument.shape, argument.stride(), argument.dtype)
    return tuple(argument) if isinstance(argument, list) else argument


@lru_cache(maxsize=4096, typed=True)
def _result_on_meta(func: Any, names: tuple[str, ...], /, *values: Any) -> Any:
    """`values`: the positional arguments, then those called `names`."""
    args = [
        torch.empty_strided(each.shape, each.stride, dtype=each.dtype, device="meta")
        if isinstance(each, _Form)
        else each
        for each in values
    ]
    named = len(args) - len(names)
    return func(*args[:named], **dict(zip(names, args[named:], strict=True)))


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    dim %= tensors[0].dim()
    shape = list(tensors[0].shape)
    shape[dim] = sum(t.shape[dim] for t in tensors)
    kinds = {t.dtype for t in tensors}
    if len(kinds) != 1:
        raise NotCapturableError("torch's cat of several types")
    out, start = torch.empty(shape, dtype=kinds.pop()), 0
    for each in tensors:
        out.narrow(dim, start, each.shape[dim]).copy_(each)
        start += each.shape[dim]
    return out


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return _cat([t.unsqueeze(dim) for t in tensors], dim)


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, None, None]:
    if len(shape) != 1 or weight is None or weight.dtype != x.dtype or x.dtype not in build.TYPES:
        raise NotCapturableError("a layer norm of this form")
    return norm.layer_norm(x, weight, bias, eps), None, None


COMPOSED: dict[str, Callable[..., Any]] = {
    "cat": _cat,
    "stack": _stack,
    "native_layer_norm": _layer_norm,
}
"""The name of an operation -> what computes it by other operations that are recorded."""


class _Lookup(NamedTuple):
    """A selection of rows of a table."""

    table: Tensor
    ids: Tensor
    wraps: bool = False
    """Whether negative ids count from the end."""


def _embedding(table: Tensor, ids: Tensor, *_: Any) -> _Lookup:
    return _Lookup(table, ids)


def _index_select(x: Tensor, dim: int, ids: Tensor) -> _Lookup:
    if dim % x.dim() or ids.dim() != 1:
        raise NotCapturableError("a selection of columns, or of one row")
    return _Lookup(x, ids)


def _index(x: Tensor, indices: Sequence[Tensor | None]) -> _Lookup:
    if len(indices) != 1 or indices[0] is None:
        raise NotCapturableError("a selection by several indices")
    return _Lookup(x, indices[0], wraps=True)


LOOKUPS: dict[str, Callable[..., _Lookup]] = {
    "embedding": _embedding,
    "index_select": _index_select,
    "index": _index,
}
"""The name of an operation -> a function of its arguments that returns the rows it selects."""


def record_lookup(step: Step, func: Any, args: Any, kwargs: Any) -> Tensor:
    """Records a selection of rows, or runs it if the step is not recorded. Returns its result."""
    table, ids, wraps = LOOKUPS[func.overloadpacket.__name__](*args, **kwargs)
    if table.dim() != 2 or not table.is_contiguous() or table.dtype not in build.TYPES:
        raise NotCapturableError("a lookup in a table of this form")
    if ids.dtype not in (torch.int64, torch.int32):  # a mask, or an error
        raise NotCapturableError(f"a selection by {ids.dtype}")
    current = step.current_rows(table)
    return linear.gather(linear.table_rows(ids, len(table), wraps=wraps, current=current), table)


FACTORIES = {
    "zeros": 0,
    "zeros_like": 0,
    "new_zeros": 0,
    "ones": 1,
    "ones_like": 1,
    "new_ones": 1,
}
"""The name of an operation that makes a tensor -> the value of its elements."""
CONSTANTS = {"arange", "full", "scalar_tensor"}
"""Operations without operands, whose results are the same in each step."""


def is_computed(name: str) -> bool:
    """Whether compiled calls compute the values of torch's operation `name`."""
    tables = COMPOSED, LOOKUPS, CHOICES, REDUCTIONS, POINTWISE
    return any(name in table for table in tables) or name.removesuffix("_") in POINTWISE
