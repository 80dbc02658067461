"""Repeats a fixed sequence of operations without running its Python code again.

`capture` records the operations that a function calls on tensors of given sizes; `replay` computes
them with the current contents of the function's inputs, which must keep their memory. A graph of
the CPU backend computes any sizes up to those of the capture. A CUDA graph computes exactly the
sizes of the capture, so a smaller step is padded to them (see `swell.kernels.inputs`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, cast

from torch import Tensor

from swell.kernels import backends


class NotCapturableError(RuntimeError):
    """Raised when a function computes something that a replay would omit."""


class Traits(NamedTuple):
    """How the graphs of a backend work."""

    has_fixed_sizes: bool
    """Whether a graph computes exactly the sizes of its capture."""
    accepts_torch: bool
    """Whether a graph repeats torch's own operations, not only those of the backend."""
    is_asynchronous: bool
    """Whether `replay` returns before its results are computed, so that they may still be in use
    when the next replay begins."""


class Probe(NamedTuple):
    """The function of a capture with other sizes."""

    run: Callable[[], list[Tensor]]
    sizes: tuple[int, ...]


class Graph(Protocol):
    computes_torch: bool
    """Whether a replay computes torch's own arithmetic by other code. The first replay should then
    be compared with what the function computes."""

    def replay(self, *sizes: int) -> None:
        """Computes the first rows of the captured results from the current values of the inputs.
        `sizes` are the numbers of rows, in the order of the capture's sizes; a graph with fixed
        sizes ignores them."""

    @property
    def progress(self) -> int:
        """Operations computed by all replays, including one in progress, or, where the host cannot
        see them, the number of replays. May be read from any thread."""


class Comparison(Protocol):
    difference: str | None
    """The first operation with another result than torch's, except for rounding; None: there is
    none."""


class _Backend(Protocol):
    """The module `graph` of a backend."""

    TRAITS: Traits

    def capture(
        self, run: Callable[[], list[Tensor]], sizes: tuple[int, ...], probe: Probe | None
    ) -> tuple[list[Tensor], Graph]: ...

    def rounding_like_replays(self) -> AbstractContextManager[object]: ...

    def compared_with_torch(self) -> AbstractContextManager[Comparison]:
        """Required if graphs compute torch's own operations by other code."""
        ...


def can_capture(device: str) -> bool:
    """Whether the fastest backend of a device type can record its operations."""
    return backends.load(backends.BACKENDS[device][0], "graph") is not None


def traits(device: str) -> Traits:
    """Returns how the graphs of a device type work. Requires `can_capture(device)`."""
    return _backend(device).TRAITS


def capture(
    run: Callable[[], list[Tensor]], device: str, *sizes: int, probe: Probe | None = None
) -> tuple[list[Tensor], Graph]:
    """Records what a function computes. Returns its results, not filled yet, and the graph that
    fills them.

    The function may be called more than once, with the current contents of its inputs. Each row
    must be computed by itself. Raises `NotCapturableError` if a replay would omit something that
    the function does. If a replay computes torch's own operations, they are compared with those of
    `probe`: a function that uses a number of rows as a number cannot be replayed.

    Backends: cpu (each operation has one of `sizes` rows, and these differ; of the tensors that
    torch's own operations read, only integers are inputs, and other tensors that were made before
    are constants), triton (needs no probe: its sizes are fixed).
    """
    return _backend(device).capture(run, sizes, probe)


def rounding_like_replays(device: str) -> AbstractContextManager[object]:
    """Returns a context in which torch's own operations in this thread round as a replay rounds
    them. Operations that a graph cannot repeat are computed by torch. The context may be entered
    several times, one after the other."""
    return _backend(device).rounding_like_replays()


def compared_with_torch(device: str) -> AbstractContextManager[Comparison]:
    """Returns a context in which torch's own operations in this thread round as a replay rounds
    them, and each is compared with torch, which computes it from the same operands. Requires that
    graphs of the device compute such operations (`Graph.computes_torch`)."""
    return _backend(device).compared_with_torch()


def _backend(device: str) -> _Backend:
    return cast("_Backend", backends.get("graph", device))
