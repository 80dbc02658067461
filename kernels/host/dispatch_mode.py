"""Torch's dispatch modes, for several threads."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that several threads may enter at the same time, each its own.

    For each operator, torch makes a Python object when a mode of any thread first meets the
    operator, and keeps its address without a reference. If two threads make the object at the same
    time, one of the two objects is freed, and its address may be the one that torch keeps: later
    calls crash. So this class makes the objects of all operators first, one after the other.
    """

    def __enter__(self) -> Self:
        _make_operators()
        super().__enter__()  # type: ignore[no-untyped-call]  # in torch without annotations
        return self


_lock = threading.Lock()
_made: set[str] = set()
"""The names of the operators whose Python objects exist."""


def _make_operators() -> None:
    """Makes the Python objects of all operators that have none: 0.1 s at the first call, and 2 ms
    at the next ones, which may find operators that a library has added."""
    with _lock:
        for name in set(torch._C._dispatch_get_all_op_names()) - _made:
            namespace, _, operator = name.partition("::")
            operator, _, overload = operator.partition(".")
            with contextlib.suppress(AttributeError):  # torch makes objects for some operators only
                packet: Any = getattr(getattr(torch.ops, namespace), operator)
                getattr(packet, overload or "default")
            _made.add(name)
