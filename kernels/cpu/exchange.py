"""Collective operations compiled from `exchange.cpp`, between processes of one machine."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from swell.kernels.cpu.build import TYPES
from swell.kernels.cpu.capture.recording import INT, POINTER, Function, UnrecordedFunction

SLOT_BYTES = 1 << 20
"""The largest part of a tensor that is exchanged at a time. A rank has two slots."""
_LINE_BYTES = 64


class _Exchange(ctypes.Structure):
    """The struct `Exchange` of exchange.cpp."""

    _fields_ = [
        ("region", POINTER),
        ("processes", POINTER),
        *((name, INT) for name in ("rank", "ranks", "slot_bytes", "timeout_ns")),
        *((name, INT) for name in ("step", "failure", "lost")),
    ]

    def set_timeout(self, timeout_s: float) -> None:
        self.timeout_ns = int(timeout_s * 1e9)


_FAILURES = {
    1: "a rank has left or aborted the group",
    2: "rank {} has ended",
    3: "rank {} did not arrive in {:g} s",
}

_all_reduce = Function(
    "swell_all_reduce",
    "rows",
    **dict.fromkeys(("exchange", "data"), POINTER),
    **dict.fromkeys(("rows", "size", "is_bf16"), INT),
)
_all_gather = Function(
    "swell_all_gather",
    "rows",
    **dict.fromkeys(("exchange", "x", "out"), POINTER),
    **dict.fromkeys(("rows", "row_bytes"), INT),
)


def region_bytes(ranks: int) -> int:
    """Returns the size of the shared memory of this many ranks."""
    return _LINE_BYTES * (1 + ranks) + 2 * ranks * SLOT_BYTES


class Exchange:
    """One rank's view of the shared memory of a group. Only one thread may exchange; any thread may
    abort."""

    def __init__(
        self, region: mmap.mmap, rank: int, processes: Sequence[int], timeout_s: float
    ) -> None:
        """`region`: `region_bytes` bytes, which were zero before the first rank used them;
        `processes`: a descriptor of each rank's process (`os.pidfd_open`)."""
        self._region = (ctypes.c_char * len(region)).from_buffer(region)
        self._processes = (INT * len(processes))(*processes)
        self._state = _Exchange(
            region=ctypes.addressof(self._region),
            processes=ctypes.addressof(self._processes),
            rank=rank,
            ranks=len(processes),
            slot_bytes=SLOT_BYTES,
        )
        self.set_timeout(timeout_s)
        self._address = ctypes.addressof(self._state)
        self._abort = UnrecordedFunction("swell_abort_exchange", POINTER)

    def set_timeout(self, timeout_s: float) -> None:
        """Sets how long an operation waits for a rank, in seconds."""
        self._state.set_timeout(timeout_s)

    @property
    def failure(self) -> str:
        """The reason why the last operation failed; '' if it did not. Later ones do nothing."""
        text = _FAILURES.get(self._state.failure, "")
        return text.format(self._state.lost, self._state.timeout_ns / 1e9)

    def all_reduce(self, x: Tensor) -> bool:
        """Sums x [..., size] over the ranks, in place and in float32, in rank order. Returns False
        for a type that it cannot sum."""
        if x.dtype not in TYPES:
            return False
        size = x.shape[-1] if x.dim() else 1
        _all_reduce(
            self._address, x.data_ptr(), x.numel() // max(1, size), size,
            x.dtype == torch.bfloat16, used=(x,),
        )  # fmt: skip
        return True

    def all_gather(self, x: Tensor, out: Tensor, rows: int) -> None:
        """x [rows, ...] -> out [rows, ranks, ...], both contiguous."""
        row_bytes = x.nbytes // max(1, rows)
        _all_gather(self._address, x.data_ptr(), out.data_ptr(), rows, row_bytes, used=(x, out))

    def abort(self) -> None:
        """Makes operations in flight fail, at all ranks."""
        self._abort(self._address)
