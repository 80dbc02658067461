"""Repeats a fixed sequence of operations without running its Python code again.

This works like CUDA graphs: `capture` records the operations of the compiled backend that a
function calls on tensors of the largest sizes, without computing anything; `replay` computes them
in the current sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from swell.kernels import backends


class NotCapturableError(RuntimeError):
    """Raised when a function computes something that a replay would omit."""


class Graph(Protocol):
    def replay(self, *sizes: int) -> None:
        """Computes the first rows of the captured results from the current values of the inputs.
        `sizes` are the numbers of rows, in the order of the capture's sizes."""

    @property
    def progress(self) -> int:
        """Operations computed by all replays, including one in progress. May be read from any
        thread."""


def can_capture(device: str) -> bool:
    """Whether a backend of a device type can record its operations."""
    return backends.load(backends.BACKENDS[device][0], "graph") is not None


def capture(
    run: Callable[[], list[Tensor]], device: str, *sizes: int
) -> tuple[list[Tensor], Graph]:
    """Records what a function computes. Returns its results, not filled yet, and the graph that
    fills them.

    The function's inputs must keep their memory. The number of rows of each operation that it calls
    must be one of `sizes`, which must differ, and each row must be computed by itself. Raises
    `NotCapturableError` if the function does anything except allocating, viewing and passing
    tensors between operations of the backend, or if one of these has another number of rows.
    Backends: cpu.
    """
    assert len(set(sizes)) == len(sizes)
    with backends.get("graph", device).recorded(sizes) as graph, _OnlyViews() as views:
        results = run()
    graph.finish(views.made, results)
    return results, graph


_MAKERS = ("empty", "empty_like", "empty_strided")
_VIEWS = (
    *("alias", "as_strided", "detach", "expand", "flatten", "narrow", "permute", "select", "slice"),
    *("split", "split_with_sizes", "squeeze", "t", "transpose", "unflatten", "unsqueeze", "view"),
)


class _OnlyViews(TorchDispatchMode):
    """Allows only operations that need not be replayed, and remembers the tensors that were
    made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # in torch without annotations
        self.made: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        if name in _MAKERS:
            self.made.append(result)
        elif name not in _VIEWS:
            raise NotCapturableError(f"torch's {name} is not an operation that a replay can repeat")
        return result
