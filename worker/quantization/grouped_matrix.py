"""Quantized matrices: numbers of few bits, and a scale for each group of them.

    value[r, c] = (level[r, c] - zero[r, g]) * scale[r, g],   g = the group of column c

All schemes have this form and differ in where the levels, zeros and scales are stored. A part is
computed in float32 and rounded once, to the requested type.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from swell.kernels.weights.quantized import GROUPS, INTEGERS, Numbers, QuantizedTensor
from swell.worker.checkpoint.checkpoint import (
    CUT_GROUP,
    DamagedCheckpoint,
    Index,
)
from swell.worker.checkpoint.safetensors_files import FLOATS, SafetensorsTensor

Parts = Mapping[str, SafetensorsTensor]
"""Suffix of a stored tensor's name -> the tensor."""

WORDS = ("I32",)
"""Types of packed integers."""
INDICES = ("I32", "I64")
SCALES = (*FLOATS, "F8_E4M3", "F8_E5M2", "F8_E8M0", "U8")
ZEROS = (*SCALES, "I8", "I16", *INDICES)
"""Types of zeros that are not packed."""
KEPT_BITS = (4, 8)
"""Bits of integers with which products can be computed."""
BLOCK_VALUES = 1 << 20
"""The number of values that are dequantized at a time: bounds the memory for float32 values."""


class Grid(NamedTuple):
    """The scales and zeros of some rows."""

    scales: torch.Tensor
    """[rows, G] float32, or [rows, 1] if all columns have one group."""
    zeros: torch.Tensor | float = 0.0
    """Like `scales`, or one number for all."""


class GroupedMatrix(ABC):
    """A matrix [out, in] that a checkpoint stores as several tensors."""

    unit: tuple[int, int] = (1, 1)
    """Rows and columns that are stored together, so that parts must begin at multiples of them."""
    bits: int | None = None
    """Bits of an integer that represents a stored number; None: no integer does."""
    step = 1.0
    """A power of two: a stored number is an integer, multiplied by this."""
    numbers = Numbers.INTEGERS
    """The stored numbers. Floats that some integers represent have `bits`, too."""
    group_size: int | None = None
    """The number of neighbouring columns with one scale; None: groups are not neighbours."""

    def __init__(self, name: str, method: str, parts: Parts, needed: Collection[str] = ()) -> None:
        """`needed`: the suffixes of tensors that the config declares; without them, the other
        tensors would mean other numbers."""
        self.name, self.method, self.parts, self._needed = name, method, parts, needed

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """out, in"""
        with self._explained():
            for suffix in self._needed:
                self.part(suffix)
            return self.find_shape()

    @abstractmethod
    def find_shape(self) -> tuple[int, int]:
        """Returns out and in. Raises `DamagedCheckpoint` if the types and shapes of the stored
        tensors do not belong together: the other methods rely on them."""

    @abstractmethod
    def levels(self, rows: range, columns: range) -> torch.Tensor:
        """Returns the stored numbers of a part whose borders are multiples of `unit`, or the
        matrix's own borders."""

    def codes(self, rows: range, columns: range) -> torch.Tensor:
        """Returns the bits of the floats of such a part, uint8."""
        raise NotImplementedError

    @abstractmethod
    def grid(self, rows: range) -> Grid:
        """Returns the scales of rows whose borders are multiples of `unit`."""

    @abstractmethod
    def groups(self, columns: range) -> torch.Tensor:
        """Returns the group of each column, [C] int64."""

    @property
    def file(self) -> Path:
        return next(iter(self.parts.values())).file

    @property
    def description(self) -> str:
        return f"{self.method} matrix {self.name!r} in {str(self.file)!r}"

    def part(self, suffix: str) -> SafetensorsTensor:
        """Returns a stored tensor. Raises `DamagedCheckpoint` if it is missing."""
        if suffix not in self.parts:
            raise DamagedCheckpoint(
                f"{self.description} lacks its tensor {suffix!r}; it has only "
                f"{', '.join(sorted(self.parts))}; copy or download the files again"
            )
        return self.parts[suffix]

    def checked(self, suffix: str, types: Collection[str], *shape: int | None) -> SafetensorsTensor:
        """Returns a stored tensor. Raises `DamagedCheckpoint` if it is missing, or has another type
        or shape. None: any size but 0."""
        tensor = self.part(suffix)
        sizes = tensor.shape
        fits = len(sizes) == len(shape) and all(
            size == wanted if wanted is not None else size > 0
            for size, wanted in zip(sizes, shape, strict=False)
        )
        if tensor.stored_type not in types or not fits:
            expected = ", ".join("any" if each is None else str(each) for each in shape)
            raise self.refuse(
                f"has a tensor {suffix!r} of type {tensor.stored_type} and shape {list(sizes)}, "
                f"but needs the type {' or '.join(types)} and the shape [{expected}]"
            )
        return tensor

    def read_order(self, suffix: str, columns: int, groups: int) -> torch.Tensor | None:
        """Returns the stored group of each column, [in] int64; None if all are -1: columns are not
        ordered. Raises `DamagedCheckpoint` for a number that is not a group."""
        order = self.checked(suffix, INDICES, columns).read_whole().long()
        low, high = int(order.min()), int(order.max())
        if low == high == -1:
            return None
        if low < 0 or high >= groups:
            raise self.refuse(f"has {groups} groups, but its {suffix!r} has {low} to {high}")
        return order

    def refuse(self, why: str) -> DamagedCheckpoint:
        """Returns the error for stored tensors that do not make a matrix."""
        return DamagedCheckpoint(
            f"{self.description} {why}; copy or download the files again, or serve the checkpoint "
            "from which it was made"
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns any error of stored tensors that were not checked into a refusal."""
        try:
            yield
        except DamagedCheckpoint:
            raise
        except Exception as error:
            text = " ".join(str(error).split())
            raise self.refuse(f"cannot be read ({type(error).__name__}: {text})") from error

    def read(self, index: Index, dtype: torch.dtype) -> torch.Tensor:
        if not dtype.is_floating_point:
            raise ValueError(f"{self.description} is quantized, but the parameter is not a float")
        with self._explained():
            return self._read(index, dtype)

    def _read(self, index: Index, dtype: torch.dtype) -> torch.Tensor:
        rows, columns = (_bounds(each, n) for each, n in zip(index, self.shape, strict=True))
        values = torch.empty(len(rows), len(columns), dtype=dtype)
        wide = _aligned(columns, self.unit[1], self.shape[1])
        here = slice(columns.start - wide.start, columns.stop - wide.start)
        for block, of_block, of_part in self._blocks(rows, len(wide)):
            values[of_part] = self._values(block, wide)[of_block, here]
        for dim, each in reversed(list(enumerate(index))):
            if isinstance(each, int):
                values = values.select(dim, 0)
        return values

    def read_quantized(
        self, index: Index, computed: Collection[Numbers] = INTEGERS
    ) -> QuantizedTensor | str:
        with self._explained():
            return self._read_quantized(index, computed)

    def _read_quantized(self, index: Index, computed: Collection[Numbers]) -> QuantizedTensor | str:
        rows, columns = (_bounds(each, n) for each, n in zip(index, self.shape, strict=True))
        numbers = self.numbers if self.numbers in computed else Numbers.INTEGERS
        size, bits = self.group_size, numbers.float_bits or self.bits
        if size is None or bits not in KEPT_BITS:
            what = f"{bits} bits" if bits else "floats"
            return f"stored as {self.method}, {what}{'' if size else ', groups not neighbours'}"
        has_one = size >= self.shape[1]
        size = len(columns) if has_one else size
        borders = columns.start, columns.stop
        whole = max(GROUPS[0], self.unit[1]) if has_one else size
        if not size or size % GROUPS[0] or any(border % whole for border in borders):
            return f"{CUT_GROUP} of {self.group_size}"
        groups = slice(0, 1) if has_one else slice(columns.start // size, columns.stop // size)
        integers = torch.empty(len(rows), len(columns), dtype=torch.uint8)
        scales = torch.empty(len(rows), groups.stop - groups.start)
        zeros = torch.empty_like(scales)
        for block, of_block, of_part in self._blocks(rows, len(columns)):
            grid = self._finite_grid(block)
            if numbers.float_bits:
                integers[of_part] = self.codes(block, columns)[of_block]
                scales[of_part] = grid.scales[of_block, groups]
                continue
            levels = self.levels(block, columns)
            if levels.is_floating_point():
                levels = (levels / self.step).to(torch.int8)
            is_signed = levels.dtype == torch.int8
            levels = levels.view(torch.uint8) ^ 128 if is_signed else levels
            integers[of_part] = levels[of_block]
            scales[of_part] = grid.scales[of_block, groups] * self.step
            stored = grid.zeros
            if isinstance(stored, torch.Tensor):
                stored = stored[of_block, groups]
            zeros[of_part] = stored + (128.0 if is_signed else 0.0)
        if size not in GROUPS:  # smaller groups with equal scales
            times = size // math.gcd(size, GROUPS[-1])
            scales, zeros = (each.repeat_interleave(times, 1) for each in (scales, zeros))
        if numbers.float_bits:
            if numbers is Numbers.E4M3 and bool(((integers & 127) == 127).any()):
                return "has a number that is NaN"
            return QuantizedTensor(integers, scales, None, bits, numbers)
        is_middle = bool((zeros == 1 << (bits - 1)).all())
        if is_middle:
            return QuantizedTensor(integers, scales, None, bits)
        exact = -zeros.double() * scales.double()
        mins = exact.float()
        if not mins.double().equal(exact):
            return "products of zeros and scales need more bits than float32"
        return QuantizedTensor(integers, scales, mins, bits)

    def _blocks(self, rows: range, columns: int) -> Iterator[tuple[range, slice, slice]]:
        """Splits rows into aligned blocks of at most `BLOCK_VALUES` values. Yields a block, its
        part that belongs to `rows`, and the place of this part in `rows`."""
        unit = self.unit[0]
        step = max(1, BLOCK_VALUES // max(1, columns) // unit) * unit
        for start in range(rows.start // unit * unit, rows.stop, step):
            block = range(start, min(start + step, self.shape[0]))
            own = range(max(start, rows.start), min(block.stop, rows.stop))
            yield (
                block,
                slice(own.start - start, own.stop - start),
                slice(own.start - rows.start, own.stop - rows.start),
            )

    def _values(self, rows: range, columns: range) -> torch.Tensor:
        """Returns the values of an aligned part, [R, C] float32."""
        values = self.levels(rows, columns).to(torch.float32)
        scales, zeros = self._finite_grid(rows)
        if scales.shape[1] > 1:
            groups = self.groups(columns)
            scales = scales.index_select(1, groups)
            zeros = zeros.index_select(1, groups) if isinstance(zeros, torch.Tensor) else zeros
        if isinstance(zeros, torch.Tensor) or zeros != 0.0:
            values = values - zeros
        return values * scales

    def _finite_grid(self, rows: range) -> Grid:
        """Returns `grid(rows)`. Raises `DamagedCheckpoint` for a scale that is not finite."""
        grid = self.grid(rows)
        if not bool(grid.scales.isfinite().all()):
            raise self.refuse("has a scale that is infinite or not a number")
        return grid


def slice_of(part: range, per: int = 1) -> slice:
    """Returns the slice of stored rows or columns that hold `part`, `per` of it in each."""
    return slice(part.start // per, -(-part.stop // per))


def _bounds(entry: slice | int, size: int) -> range:
    if isinstance(entry, int):
        return range(entry, entry + 1)
    return range(*entry.indices(size))


def _aligned(part: range, unit: int, size: int) -> range:
    return range(part.start // unit * unit, min(-(-part.stop // unit) * unit, size))
