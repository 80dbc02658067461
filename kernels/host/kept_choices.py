"""Replays the expert choices of one run in another run, whose numbers are rounded differently.

A router chooses the experts with the largest logits. If two logits are nearly equal, another
rounding chooses another expert, and the results differ by much more than rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from swell.kernels.host.dispatch_mode import DispatchMode

_ROUNDING = 0.2
"""How much the elements that another run chooses may be below the largest ones, relative to the
largest magnitude. The logits of a router may be rounded to bfloat16, and so are its inputs."""


class KeptChoices:
    """The choices that torch's `topk` makes in one run."""

    def __init__(self) -> None:
        self._indices: list[Tensor] = []

    def keep(self) -> DispatchMode:
        """Keeps the choices that are made in this context."""
        return _Keep(self._indices)

    def repeat(self) -> RepeatedChoices:
        """Makes the kept choices in this context, in their order."""
        return RepeatedChoices(self._indices)


def _is_topk(func: Any) -> bool:
    return bool(func.overloadpacket.__name__ == "topk")


class _Keep(DispatchMode):
    def __init__(self, indices: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # in torch without annotations
        self._indices = indices

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_topk(func):
            self._indices.append(result[1])
        return result


class RepeatedChoices(DispatchMode):
    """Replaces the choices of a run by those of an earlier one."""

    def __init__(self, indices: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # in torch without annotations
        self._indices = iter(indices)
        self.are_valid = True
        """Whether the earlier run made as many choices, and from nearly the same numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _is_topk(func):
            return result
        x, dim = args[0], args[2] if len(args) > 2 else -1
        values, own = result
        indices = next(self._indices, None)
        if indices is None or indices.shape != own.shape:
            self.are_valid = False
            return result
        repeated = x.gather(dim, indices)
        least = values.amin(dim, keepdim=True)
        bound = _ROUNDING * values.abs().nan_to_num().amax(dim, keepdim=True)
        self.are_valid &= not bool((repeated < least - bound).any())
        return repeated, indices
