"""Compares the compiled calls that replace torch's operations with torch, one operation at a time.

Both compute the same operands, so only the rounding of one operation differs, and choices do not
differ at all: elements that are selected, moved or compared are equal.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from swell.kernels.cpu.capture import torch_operations as operations

_ROUNDINGS = 16
"""The bound for one operation on elements, in roundings of float32. Approximations of functions
differ by a few, and their results are then rounded once to their type."""
_SELECTIONS = {
    *("where", "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "masked_fill", "relu"),
    *("copy", "_to_copy", "clone", "fill", "zero", "neg", "abs"),
}
"""Operations on elements whose results are operands, perhaps of another type."""


def compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Computes an operation with torch, and leaves its operands as they are."""
    if func._schema.is_mutable:
        args, kwargs = tree_map_only(Tensor, torch.clone, (args, kwargs))
    return func(*args, **kwargs)


def are_equal(func: Any, args: Any, expected: Any, found: Any) -> bool:
    """Whether results are those of torch for the operation `func`, except for rounding."""
    name = func.overloadpacket.__name__
    if name == "topk":  # of equal elements, any may be chosen
        x, dim = args[0], args[2] if len(args) > 2 else -1
        expected = expected[0], expected[0]
        found = found[0], x.gather(dim, found[1])
        if len(args) > 4 and not args[4]:  # in any order
            expected, found = (
                [values.sort(dim).values for values in each] for each in (expected, found)
            )
    bound = _bound(name, func, args, expected)
    pairs = zip(tree_leaves(expected), tree_leaves(found), strict=True)
    return all(_agree(*pair, bound) for pair in pairs if pair[1] is not None)


def _agree(expected: Tensor, found: Tensor, bound: Tensor | float) -> bool:
    if not expected.is_floating_point():
        return torch.equal(expected, found)
    difference = (expected.double() - found.double()).abs()
    own = torch.finfo(expected.dtype).eps * expected.double().abs()
    is_nan = expected.isnan() & found.isnan()
    return bool(((expected == found) | is_nan | (difference <= own + bound)).all())


def _bound(name: str, func: Any, args: Any, expected: Any) -> Tensor | float:
    """Returns how much a result may differ from torch's, in addition to one rounding of its own
    type: a number of roundings of the numbers from which it is computed."""
    eps = torch.finfo(torch.float32).eps
    if name.removesuffix("_") in _SELECTIONS or name in ("topk", "gather", "scatter_", "amax"):
        return 0.0
    if name in operations.LOOKUPS or name in ("cat", "stack"):
        return 0.0
    if name == "native_layer_norm":
        x, _, weight, bias, *_ = args
        normed = x.double().abs().amax(-1, keepdim=True) * expected[2].double()
        return _ROUNDINGS * eps * (normed * weight.double().abs() + _magnitude(bias))
    if name == "_softmax":
        x, dim, *_ = args
        spread = x.double().amax(dim, keepdim=True) - x.double()
        return _ROUNDINGS * eps * (1 + spread.nan_to_num(0, 0, 0)) * expected.double()
    if name in ("sum", "mean", "mm"):  # terms may cancel each other
        terms = args[0].shape[1] if name == "mm" else args[0].numel() / max(1, expected.numel())
        given = tree_map_only(Tensor, lambda t: t.double().abs(), args)
        return _ROUNDINGS * eps * math.sqrt(terms) * func(*given)
    numbers = [expected, *(a for a in args if isinstance(a, Tensor | int | float))]
    return _ROUNDINGS * eps * sum(map(_magnitude, numbers), start=torch.zeros(()))


def _magnitude(operand: Any) -> Tensor:
    """Returns absolute values; 0 for those that are not finite."""
    if operand is None:
        return torch.zeros(())
    return torch.as_tensor(operand).double().abs().nan_to_num(0, 0, 0)
