"""Compares two recordings of one function with different numbers of rows.

A recording replays any number of rows. A replay is wrong if the function used the number of rows as
a number: in arithmetic, as the index of the last row, or to choose what to compute. Such numbers
differ between two recordings, and so do the sizes and strides of tensors, which are multiples of a
number of rows.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple

from torch import Tensor

from swell.kernels.cpu.capture.recording import POINTER, RecordedCall, Recording
from swell.kernels.graph import NotCapturableError


class Recorded(NamedTuple):
    recording: Recording
    """A recording whose `finish` has not been called."""
    made: list[Tensor]
    """The tensors made during the recording."""
    results: list[Tensor]


def refuse_differences(a: Recorded, b: Recorded) -> None:
    """Raises `NotCapturableError` for a call that uses a number of rows as a number."""
    views = _View(a), _View(b)
    if len(a.recording.calls) != len(b.recording.calls):
        raise NotCapturableError("the number of rows decides which operations are computed")
    for i, calls in enumerate(zip(a.recording.calls, b.recording.calls, strict=True)):
        if not _are_equal(views, calls):
            name = a.recording.names.get(i, calls[0].function.name)
            raise NotCapturableError(f"{name} depends on the number of rows")
    for results in zip(a.results, b.results, strict=True):
        tensors = [(result,) for result in results]
        shapes = [(*result.shape, *result.stride()) for result in results]
        if not (
            _are_proportional(views, *shapes)
            and _point_to_equals(views, [result.data_ptr() for result in results], tensors)
        ):
            raise NotCapturableError("a result depends on the number of rows")


class _View:
    """The addresses of a recording's tensors."""

    def __init__(self, recorded: Recorded) -> None:
        self.recording = recorded.recording
        storages = [each.untyped_storage() for each in recorded.made]
        self._made = sorted((s.data_ptr(), s.nbytes(), i) for i, s in enumerate(storages))

    def find(self, address: int) -> tuple[int, int] | None:
        """Returns the index of the tensor, among those that were made, with this address, and the
        offset in it; None: there is none."""
        at = bisect_right(self._made, address, key=itemgetter(0)) - 1
        if at < 0:
            return None
        start, size, index = self._made[at]
        return (index, address - start) if address < start + size else None


def _are_equal(views: tuple[_View, _View], calls: tuple[RecordedCall, RecordedCall]) -> bool:
    if calls[0].function is not calls[1].function or calls[0].size != calls[1].size:
        return False
    used = [call.used for call in calls]
    for field in calls[0].arguments._fields_:
        name, kind = field[:2]
        values = [getattr(call.arguments, name) for call in calls]
        if kind is POINTER:
            if not _point_to_equals(views, [value or 0 for value in values], used):
                return False
        elif not _are_proportional(views, *([value] for value in values)):
            return False
    return True


def _are_proportional(views: tuple[_View, _View], a: Iterable[float], b: Iterable[float]) -> bool:
    """Whether numbers are equal, or multiples of a number of rows."""
    own, other = (view.recording.sizes for view in views)
    factors = [*zip(own, other, strict=True)]
    return all(
        x == y or any(x * of_b == y * of_a for of_a, of_b in factors)
        for x, y in zip(a, b, strict=True)
    )


def _point_to_equals(
    views: tuple[_View, _View], addresses: list[int], used: Sequence[tuple[Tensor, ...]]
) -> bool:
    """Whether addresses are those of one tensor, of tensors that were made one for the other, or of
    constants with equal bytes."""
    if addresses[0] == addresses[1]:
        return True
    at = [view.recording.current_size_at(each) for view, each in zip(views, addresses, strict=True)]
    found = [view.find(each) for view, each in zip(views, addresses, strict=True)]
    if at != [None, None]:
        return at[0] == at[1]
    if found[0] is None and found[1] is None:
        return _have_equal_bytes(addresses, used)
    if found[0] is None or found[1] is None or found[0][0] != found[1][0]:
        return False
    return _are_proportional(views, [found[0][1]], [found[1][1]])


def _have_equal_bytes(addresses: list[int], used: Sequence[tuple[Tensor, ...]]) -> bool:
    """Compares as many bytes as both constants have."""
    counts = [_bytes_from(address, each) for address, each in zip(addresses, used, strict=True)]
    bytes_ = [ctypes.string_at(address, min(counts)) for address in addresses]
    return min(counts) > 0 and bytes_[0] == bytes_[1]


def _bytes_from(address: int, tensors: tuple[Tensor, ...]) -> int:
    """Returns how many bytes follow an address in the storage of the tensor that has it."""
    storages = [each.untyped_storage() for each in tensors]
    ends = [s.data_ptr() + s.nbytes() for s in storages if s.data_ptr() <= address]
    return min((end - address for end in ends if address < end), default=0)
