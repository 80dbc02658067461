"""Calls of compiled functions: each takes one struct of arguments, so calls can be recorded and run
again as they were, all in one go.

What a recording replays are addresses: inputs are written to the tensors that were there when it
was made, and results are read from those that it returned then.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from swell.kernels.cpu.build import library

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Call(ctypes.Structure):
    """`Call` of graph.cpp."""

    _fields_ = [("run", ctypes.c_void_p), ("arguments", ctypes.c_void_p)]


class Recording:
    """Calls in the order in which they were made, and all that they read and write."""

    def __init__(self) -> None:
        self._kept: list[object] = []
        self._calls: list[_Call] = []
        self._array: ctypes.Array[_Call] | None = None

    def add(self, run: int, arguments: ctypes.Structure, used: tuple[Tensor, ...]) -> None:
        self._kept.append((arguments, used))
        self._calls.append(_Call(run, ctypes.addressof(arguments)))

    def replay(self) -> None:
        """Make the calls again."""
        if self._array is None:
            self._array = (_Call * len(self._calls))(*self._calls)
        _replay(self._array, len(self._calls))


class _Current(threading.local):
    recording: Recording | None = None


_current = _Current()


@contextmanager
def recorded() -> Iterator[Recording]:
    """The calls that this thread makes meanwhile."""
    assert _current.recording is None
    _current.recording = recording = Recording()
    try:
        yield recording
    finally:
        _current.recording = None


class Function:
    """A function of the compiled library."""

    def __init__(self, name: str, **fields: type) -> None:
        """`fields`: name -> type of each member of its struct, in order."""
        self._run = getattr(library(), name)
        self._run.argtypes, self._run.restype = [ctypes.c_void_p], None
        self._address = ctypes.cast(self._run, ctypes.c_void_p).value or 0
        self._struct = type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})

    def __call__(self, *values: float | None, used: tuple[Tensor, ...]) -> None:
        """`values`: the members of the struct; `used`: the tensors whose addresses are in it."""
        arguments = self._struct(*values)
        self._run(ctypes.byref(arguments))
        if _current.recording is not None:
            _current.recording.add(self._address, arguments, used)


_replay = library().swell_replay
_replay.argtypes = [ctypes.POINTER(_Call), ctypes.c_int64]
_replay.restype = None
