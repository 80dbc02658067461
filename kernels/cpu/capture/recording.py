"""Calls compiled functions. Each one accepts one struct of arguments, so calls can be recorded and
replayed together, with other numbers of rows. While they are recorded, nothing is computed.

A recording stores addresses: its inputs must be written to the tensors that were used during the
recording, and its results are in the tensors that it returned then. All intermediate tensors share
one piece of memory, as small as the order of the calls allows.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import le
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swell.kernels.cpu.build import library
from swell.kernels.cpu.capture.arena import Lifetime, assign_offsets
from swell.kernels.graph import NotCapturableError

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Call(ctypes.Structure):
    """The struct `Call` of graph.cpp."""

    _fields_ = [("run", POINTER), ("arguments", POINTER), ("rows", POINTER), ("size", INT)]


class _Replay(ctypes.Structure):
    """The struct `ReplayArgs` of graph.cpp."""

    _fields_ = [("calls", POINTER), ("count", INT), ("sizes", POINTER), ("progress", INT)]


class RecordedCall(NamedTuple):
    function: Function
    arguments: ctypes.Structure
    used: tuple[Tensor, ...]
    size: int
    """Index, among the recording's sizes, of the number of rows; -1: the call computes no rows."""


class Recording:
    """Calls in the order in which they were made, and references to all tensors that they use."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.computes_torch = False
        self.calls: list[RecordedCall] = []
        """Empty after `finish`."""
        self.names: dict[int, str] = {}
        """Index of a call -> the operation of torch that it computes."""
        self.rows: dict[int, int] = {}
        """The storages of tensors that calls with rows use -> the number of rows of the first."""
        self._references: list[object] = []
        self._checks: list[tuple[Callable[[ctypes.Structure], None], ctypes.Structure]] = []
        self._current_sizes = (INT * len(sizes))()
        self._replay = _Replay(sizes=ctypes.addressof(self._current_sizes))
        self._address = ctypes.addressof(self._replay)

    def current_size_at(self, address: int) -> int | None:
        """Returns the index of the size whose current value has this address; None: there is
        none."""
        offset = address - ctypes.addressof(self._current_sizes)
        return offset if 0 <= offset < ctypes.sizeof(self._current_sizes) else None

    def address_of_current(self, rows: int) -> int:
        """Returns the address of the int64 that is the number of rows in a replay, for one of the
        numbers of rows of the recording."""
        size = self.sizes.index(rows)
        return ctypes.addressof(self._current_sizes) + size * ctypes.sizeof(INT)

    def note_torch(self, name: str, is_arithmetic: bool) -> None:
        """Notes that the last call computes an operation of torch."""
        self.names[len(self.calls) - 1] = f"torch's {name}"
        self.computes_torch |= is_arithmetic

    def record(
        self,
        function: Function,
        arguments: ctypes.Structure,
        used: tuple[Tensor, ...],
        has_rows: bool,
    ) -> None:
        """Adds a call. Raises `NotCapturableError` if its number of rows is not one of the
        sizes."""
        rows, size = getattr(arguments, function.rows), -1
        if has_rows:
            if rows not in self.sizes:
                sizes = " or ".join(map(str, self.sizes))
                raise NotCapturableError(f"{function.name} computes {rows} rows; expected {sizes}")
            size = self.sizes.index(rows)
            for tensor in used:
                self.rows.setdefault(tensor.untyped_storage().data_ptr(), rows)
        self.calls.append(RecordedCall(function, arguments, used, size))

    def finish(self, made: list[Tensor], results: list[Tensor]) -> None:
        """Plans the memory of the tensors `made` during the recording that are not results."""
        kept = {tensor.untyped_storage().data_ptr() for tensor in results}
        storages = [tensor.untyped_storage() for tensor in made]
        sizes = {s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in kept}
        self._plan_memory(sorted(sizes.items()))
        self._references += results
        for recorded_call in self.calls:
            self._references.append(recorded_call.arguments)
            self._references += [
                t for t in recorded_call.used if t.untyped_storage().data_ptr() not in sizes
            ]
        calls = (_Call * len(self.calls))(*(_call(recorded_call) for recorded_call in self.calls))
        self._checks = [
            (recorded_call.function.check, recorded_call.arguments)
            for recorded_call in self.calls
            if recorded_call.function.check is not None
        ]
        self._replay.calls, self._replay.count = ctypes.addressof(calls), len(calls)
        self._references.append(calls)
        self.calls = []

    def _plan_memory(self, buffers: list[tuple[int, int]]) -> None:
        """Changes all arguments that point into a buffer to point to the buffer's offset in the
        common memory. `buffers`: (address, bytes), sorted."""
        begins = [begin for begin, _ in buffers]
        uses: dict[int, list[int]] = {}
        pointers = []
        for i, recorded_call in enumerate(self.calls):
            for name in recorded_call.function.pointers:
                address = getattr(recorded_call.arguments, name) or 0
                buffer = bisect_right(begins, address) - 1
                if buffer >= 0 and address < sum(buffers[buffer]):
                    uses.setdefault(buffer, []).append(i)
                    pointers.append(
                        (recorded_call.arguments, name, buffer, address - begins[buffer])
                    )
        lifetimes = [Lifetime(at[0], at[-1], buffers[buffer][1]) for buffer, at in uses.items()]
        offsets, total = assign_offsets(lifetimes)
        memory = torch.empty(total, dtype=torch.uint8)
        starts = dict(zip(uses, offsets, strict=True))
        for arguments, name, buffer, offset in pointers:
            setattr(arguments, name, memory.data_ptr() + starts[buffer] + offset)
        self._references.append(memory)

    def replay(self, *sizes: int) -> None:
        """Makes the calls for the first rows; `sizes`: the numbers of rows. Raises what the checks
        of the calls raise."""
        assert all(map(le, sizes, self.sizes)), sizes
        self._current_sizes[:] = list(sizes)
        _replay(self._address)
        for check, arguments in self._checks:
            check(arguments)

    @property
    def progress(self) -> int:
        """The number of calls made by all replays."""
        return int(self._replay.progress)


def _call(recorded_call: RecordedCall) -> _Call:
    function, arguments = recorded_call.function, ctypes.addressof(recorded_call.arguments)
    rows = getattr(type(recorded_call.arguments), function.rows).offset
    return _Call(function.address, arguments, arguments + rows, recorded_call.size)


class _Current(threading.local):
    recording: Recording | None = None


_current = _Current()


@contextmanager
def recorded(sizes: tuple[int, ...]) -> Iterator[Recording]:
    """In this context, the calls of this thread are recorded instead of run; the number of rows of
    each must be one of `sizes`."""
    assert _current.recording is None
    _current.recording = recording = Recording(sizes)
    try:
        yield recording
    finally:
        _current.recording = None


class Function:
    """A function of the compiled library."""

    def __init__(
        self,
        name: str,
        rows: str,
        check: Callable[[ctypes.Structure], None] | None = None,
        /,
        **fields: type,
    ) -> None:
        """`fields`: name -> type of each member of its struct, in order; `rows`: the member with
        the number of rows; the function must compute each row by itself; `check`: raises an
        exception if the struct says after a call that the arguments were wrong."""
        self.name, self.rows, self.check = name, rows, check
        self.pointers = [field for field, kind in fields.items() if kind is POINTER]
        self._run = getattr(library(), name)
        self._run.argtypes, self._run.restype = [POINTER], None
        self.address = ctypes.cast(self._run, POINTER).value or 0
        self._struct = type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})

    def __call__(
        self, *values: float | None, used: tuple[Tensor, ...], has_rows: bool = True
    ) -> Any:
        """Runs or records the call. `values`: the members of the struct, which is returned; `used`:
        the tensors whose addresses are in it; `has_rows`: whether a replay may have another number
        of rows."""
        arguments = self._struct(*values)
        if _current.recording is not None:
            _current.recording.record(self, arguments, used, has_rows)
        else:
            self._run(ctypes.byref(arguments))
            if self.check is not None:
                self.check(arguments)
        return arguments


class UnrecordedFunction:
    """A function of the compiled library that cannot be recorded."""

    def __init__(self, name: str, *arguments: Any, result: Any = None) -> None:
        """`arguments`, `result`: the types of ctypes."""
        self.name = name
        self._run = getattr(library(), name)
        self._run.argtypes, self._run.restype = arguments, result

    def __call__(self, *values: Any) -> Any:
        """Raises `NotCapturableError` during a recording: the function would run once, on tensors
        that nothing has computed, and never in a replay."""
        if _current.recording is not None:
            raise NotCapturableError(f"{self.name} cannot be recorded")
        return self._run(*values)


_replay = UnrecordedFunction("swell_replay", POINTER)
