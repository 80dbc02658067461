"""Running a fixed sequence of operations again, without the Python that led to it.

What CUDA calls a graph: `capture` runs a function once and notes the operations of the compiled
column; `replay` runs them again on the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch.utils._python_dispatch import TorchDispatchMode

from swell.kernels import columns

Result = TypeVar("Result")


class NotCapturableError(RuntimeError):
    """A function computes something that a replay would leave out."""


class Graph(Protocol):
    def replay(self) -> None:
        """Compute again, from the inputs' present values, into the tensors that came out first."""


def can_capture(device: str) -> bool:
    """Whether some column of a device type records its operations."""
    return columns.load(columns.COLUMNS[device][0], "graph") is not None


def capture(run: Callable[[], Result], device: str) -> tuple[Result, Graph]:
    """Run a function on tensors that stay; what it returns, and how to compute it again.

    Raises `NotCapturableError` if it does more than make, view and pass on tensors between
    operations of the column. Columns: cpu.
    """
    with columns.pick("graph", device).recorded() as graph, _OnlyViews():
        return run(), graph


_MAKERS = ("empty", "empty_like", "empty_strided")
_VIEWS = (
    *("alias", "as_strided", "detach", "expand", "flatten", "narrow", "permute", "select", "slice"),
    *("split", "split_with_sizes", "squeeze", "t", "transpose", "unflatten", "unsqueeze", "view"),
)


class _OnlyViews(TorchDispatchMode):
    """Lets through what needs no replay."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in (*_MAKERS, *_VIEWS):
            raise NotCapturableError(f"torch's {name} is no operation that a replay could repeat")
        return func(*args, **(kwargs or {}))
