"""Floats of 4 bits (E2M1), two in each byte, with a scale for each group of 16 or 32 in a row. They
are multiples of 1/2 up to 6, so integers of 8 bits represent them exactly.

    NVFP4   groups of 16; E4M3 scales, which one number for the whole matrix scales again
    MXFP4   groups of 32; E8M0 scales, so powers of two

gpt-oss stores the MXFP4 matrices of all experts as one tensor:

    X_blocks  [E, out, in / 32, 16] uint8
    X_scales  [E, out, in / 32] uint8             of the parameter X [E, in, out]
"""

from __future__ import annotations

from pathlib import Path

import torch

from swell.kernels.weights.quantized import Numbers
from swell.worker.checkpoint.checkpoint import Index, StoredTensor
from swell.worker.checkpoint.safetensors_files import FLOATS
from swell.worker.quantization.grouped_matrix import (
    SCALES,
    Grid,
    GroupedMatrix,
    Parts,
    slice_of,
)
from swell.worker.quantization.packing import float_values, scale_values, unpack_halves
from swell.worker.quantization.scheme import Scheme

ALL = slice(None)
BLOCK = 32
"""Columns of a group of MXFP4."""
NVFP4_GROUP = 16
PACKED = ("U8",)
POWERS = ("U8", "F8_E8M0")
"""Types of scales that are powers of two."""
FACTORS = (".weight_scale_2", ".weight_global_scale")
"""NVFP4 has one of them: without it, its scales would mean other numbers."""


class Mxfp4(Scheme):
    """The method `mxfp4`, as gpt-oss publishes it."""

    parts = {"_blocks": "", "_scales": ""}

    def matrix(self, name: str, parts: Parts) -> StoredTensor:
        return Mxfp4Experts(name, self.method, parts)


class Fp4Matrix(GroupedMatrix):
    """A matrix in a `weight_packed` or `weight` [out, in / 2] uint8, with `weight_scale`
    [out, groups]. NVFP4: `weight_scale_2` is a factor of all scales, `weight_global_scale` a
    divisor."""

    unit = (1, 2)
    bits = 8
    step = 0.5
    numbers = Numbers.E2M1

    def find_shape(self) -> tuple[int, int]:
        rows, octets = self.checked(self._packed, PACKED, None, None).shape
        columns = octets * 2
        self.checked(".weight_scale", SCALES, rows, -(-columns // self.group_size))
        factors = [suffix for suffix in FACTORS if suffix in self.parts]
        if not factors and self.group_size == NVFP4_GROUP:
            raise self.refuse(f"has neither {' nor '.join(map(repr, FACTORS))}")
        for suffix in factors:
            self.checked(suffix, FLOATS, *(1 for _ in self.part(suffix).shape[:1]))
        return rows, columns

    @property
    def _packed(self) -> str:
        return ".weight_packed" if ".weight_packed" in self.parts else ".weight"

    @property
    def group_size(self) -> int:  # type: ignore[override]
        return BLOCK if self.part(".weight_scale").stored_type in POWERS else NVFP4_GROUP

    def levels(self, rows: range, columns: range) -> torch.Tensor:
        return float_values(self.codes(rows, columns))

    def codes(self, rows: range, columns: range) -> torch.Tensor:
        packed = self.part(self._packed)
        return unpack_halves(packed.read_stored((slice_of(rows), slice_of(columns, 2))))

    def grid(self, rows: range) -> Grid:
        scales = scale_values(self.part(".weight_scale").read_stored((slice_of(rows), ALL)))
        if ".weight_scale_2" in self.parts:
            scales = scales * self._factor(".weight_scale_2")
        if ".weight_global_scale" in self.parts:
            scales = scales / self._factor(".weight_global_scale")
        return Grid(scales)

    def _factor(self, suffix: str) -> torch.Tensor:
        factor = self.part(suffix).read_whole().to(torch.float32)
        if not bool(factor.isfinite().all()):
            raise self.refuse(f"has a tensor {suffix!r} that is infinite or not a number")
        return factor

    def groups(self, columns: range) -> torch.Tensor:
        return torch.arange(columns.start, columns.stop) // self.group_size


class Mxfp4Experts:
    """The transposed matrices of all experts."""

    def __init__(self, name: str, method: str, parts: Parts) -> None:
        self._expert = _Mxfp4Expert(name, method, parts)

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = self._expert.shape
        return self._expert.part("_blocks").shape[0], columns, rows

    @property
    def file(self) -> Path:
        return self._expert.file

    @property
    def description(self) -> str:
        return self._expert.description

    def read(self, index: Index, dtype: torch.dtype) -> torch.Tensor:
        of_experts, rows, columns = index
        if isinstance(of_experts, int):
            return self._expert.at(of_experts).read((columns, rows), dtype).T
        experts = range(self.shape[0])[of_experts]
        parts = [self._expert.at(each).read((columns, rows), dtype).mT for each in experts]
        return torch.stack(parts)


class _Mxfp4Expert(GroupedMatrix):
    """The matrix [out, in] of one expert."""

    unit = (1, BLOCK)

    def __init__(self, name: str, method: str, parts: Parts, expert: int = 0) -> None:
        super().__init__(name, method, parts)
        self._expert = slice(expert, expert + 1)

    def at(self, expert: int) -> _Mxfp4Expert:
        """Returns the matrix of another expert."""
        return _Mxfp4Expert(self.name, self.method, self.parts, expert)

    def find_shape(self) -> tuple[int, int]:
        octets = BLOCK // 2
        experts, rows, groups, _ = self.checked("_blocks", PACKED, None, None, None, octets).shape
        self.checked("_scales", PACKED, experts, rows, groups)
        return rows, groups * BLOCK

    def levels(self, rows: range, columns: range) -> torch.Tensor:
        here = self._expert, slice_of(rows), slice_of(columns, BLOCK), ALL
        return float_values(unpack_halves(self.part("_blocks").read_stored(here)[0])).flatten(-2)

    def grid(self, rows: range) -> Grid:
        scales = self.part("_scales").read_stored((self._expert, slice_of(rows), ALL))[0]
        return Grid(scale_values(scales))

    def groups(self, columns: range) -> torch.Tensor:
        return torch.arange(columns.start, columns.stop) // BLOCK
