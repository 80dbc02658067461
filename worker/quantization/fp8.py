"""Floats of 8 bits with a scale for the matrix, each row, or each block.

    weight            [out, in] E4M3 or E5M2
    weight_scale      one number, [out], [out, 1], or a grid of blocks [out / b0, in / b1]; a name
                      that ends with `_inv` also holds factors. E8M0 scales are powers of two.

Published as `fp8` (DeepSeek and Qwen with blocks of 128 x 128) and `fbgemm_fp8` (a scale for each
row); compressed-tensors and modelopt use the same tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from swell.worker.checkpoint.checkpoint import StoredTensor
from swell.worker.quantization.grouped_matrix import Grid, GroupedMatrix, Parts, slice_of
from swell.worker.quantization.packing import scale_values
from swell.worker.quantization.scheme import Scheme, block_size, refuse_values

FLOATS = ("F8_E4M3", "F8_E5M2")
INTEGERS = ("I8",)


class Fp8(Scheme):
    """The methods `fp8` and `fbgemm_fp8`."""

    parts = {".weight_scale_inv": ".weight", ".weight_scale": ".weight", ".weight": ".weight"}

    def __init__(self, method: str, config: Mapping[str, Any]) -> None:
        super().__init__(method, config)
        refuse_values(config, {"expert_dtype": ("fp8",), "fmt": ("e4m3", "float8_e4m3")})
        self._block = block_size(config, "weight_block_size")

    def matrix(self, name: str, parts: Parts) -> StoredTensor:
        return ScaledMatrix(name, self.method, parts, self._block)


class ScaledMatrix(GroupedMatrix):
    """A matrix of 8-bit numbers that are stored one by one."""

    def __init__(
        self, name: str, method: str, parts: Parts, block: tuple[int, int] | None = None
    ) -> None:
        """`block`: the rows and columns of a block, if the checkpoint declares them."""
        super().__init__(name, method, parts)
        self._block = block

    @property
    def shape(self) -> tuple[int, ...]:
        weight = self.part(".weight")
        if weight.stored_type not in (*FLOATS, *INTEGERS):
            raise self.refuse(f"has a scale, but its numbers have the type {weight.stored_type}")
        if len(weight.shape) != 2:
            raise self.refuse(f"has the shape {list(weight.shape)}, which is not a matrix")
        return weight.shape

    @property
    def bits(self) -> int | None:  # type: ignore[override]
        return 8 if self.part(".weight").stored_type in INTEGERS else None

    @property
    def group_size(self) -> int:  # type: ignore[override]
        return self._block_size[1]

    def levels(self, rows: range, columns: range) -> torch.Tensor:
        return self.part(".weight").read_stored((slice_of(rows), slice_of(columns)))

    def grid(self, rows: range) -> Grid:
        scales, block_rows = self._scales, self._block_size[0]
        at = torch.arange(rows.start, rows.stop) // block_rows
        if ".weight_zero_point" not in self.parts:
            return Grid(scales.index_select(0, at))
        zeros = self._as_grid(self.part(".weight_zero_point").read_whole().to(torch.float32))
        return Grid(scales.index_select(0, at), zeros.index_select(0, at))

    def groups(self, columns: range) -> torch.Tensor:
        return torch.arange(columns.start, columns.stop) // self._block_size[1]

    @cached_property
    def _scales(self) -> torch.Tensor:
        """[grid rows, grid columns] float32"""
        suffix = ".weight_scale_inv" if ".weight_scale_inv" in self.parts else ".weight_scale"
        return self._as_grid(scale_values(self.part(suffix).read_whole()))

    def _as_grid(self, values: torch.Tensor) -> torch.Tensor:
        if values.dim() == 4:  # modelopt: [out / b0, 1, in / b1, 1]
            values = values.squeeze(3).squeeze(1)
        if values.numel() == 1 or values.dim() == 1:
            values = values.reshape(-1, 1)
        if values.dim() != 2:
            raise self.refuse(f"has scales of the shape {list(values.shape)}")
        return values

    @cached_property
    def _block_size(self) -> tuple[int, int]:
        """The rows and columns that have one scale."""
        counts, sizes = tuple(self._scales.shape), self.shape
        declared = self._block or (0, 0)
        rows, columns = (self._size(*each) for each in zip(sizes, counts, declared, strict=True))
        return rows, columns

    def _size(self, size: int, count: int, declared: int) -> int:
        if count == 1:
            return size
        if declared and -(-size // declared) == count:
            return declared
        if size % count:
            raise self.refuse(
                f"has the shape {list(self.shape)}, but scales of the shape "
                f"{list(self._scales.shape)}"
            )
        return size // count
