"""Floats of 8 bits with a scale for the matrix, each row, or each block.

    weight            [out, in] E4M3 or E5M2, or signed integers
    weight_scale      one number, [out], [out, 1], or a grid of blocks [out / b0, in / b1]; a name
                      that ends with `_inv` also holds factors. E8M0 scales are powers of two.

Published as `fp8` (DeepSeek and Qwen with blocks of 128 x 128) and `fbgemm_fp8` (a scale for each
row); compressed-tensors and modelopt use the same tensors.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

import torch

from swell.kernels.weights.quantized import Numbers
from swell.worker.checkpoint.checkpoint import StoredTensor
from swell.worker.quantization.grouped_matrix import (
    SCALES,
    ZEROS,
    Grid,
    GroupedMatrix,
    Parts,
    slice_of,
)
from swell.worker.quantization.packing import scale_values
from swell.worker.quantization.scheme import Scheme

E4M3 = "F8_E4M3"
FLOATS = (E4M3, "F8_E5M2")
INTEGERS = ("I8",)
BLOCKS = ((1, 32), (128, 128))
"""The blocks of modelopt, which does not declare them, in addition to rows and the matrix."""


class Fp8(Scheme):
    """The methods `fp8` and `fbgemm_fp8`."""

    parts = {".weight_scale_inv": ".weight", ".weight_scale": ".weight", ".weight": ".weight"}

    def matrix(self, name: str, parts: Parts) -> StoredTensor:
        return ScaledMatrix(name, self.method, parts, self.declared.values.block)


class ScaledMatrix(GroupedMatrix):
    """A matrix of 8-bit numbers that are stored one by one."""

    def __init__(
        self,
        name: str,
        method: str,
        parts: Parts,
        block: tuple[int, int] | None = None,
        needed: Collection[str] = (),
    ) -> None:
        """`block`: the rows and columns of a block, if the checkpoint declares them."""
        super().__init__(name, method, parts, needed)
        self._block = block

    def find_shape(self) -> tuple[int, int]:
        rows, columns = self.checked(".weight", (*FLOATS, *INTEGERS), None, None).shape
        return rows, columns

    @property
    def bits(self) -> int | None:  # type: ignore[override]
        return 8 if self.part(".weight").stored_type in INTEGERS else None

    @property
    def numbers(self) -> Numbers:  # type: ignore[override]
        is_float = self.part(".weight").stored_type == E4M3
        return Numbers.E4M3 if is_float else Numbers.INTEGERS

    @property
    def group_size(self) -> int | None:  # type: ignore[override]
        return self._block_size[1] if self._order is None else None

    def levels(self, rows: range, columns: range) -> torch.Tensor:
        return self.part(".weight").read_stored((slice_of(rows), slice_of(columns)))

    def codes(self, rows: range, columns: range) -> torch.Tensor:
        return self.levels(rows, columns).view(torch.uint8)

    def grid(self, rows: range) -> Grid:
        scales, block_rows = self._scales, self._block_size[0]
        at = torch.arange(rows.start, rows.stop) // block_rows
        if ".weight_zero_point" not in self.parts:
            return Grid(scales.index_select(0, at))
        return Grid(scales.index_select(0, at), self._zeros.index_select(0, at))

    def groups(self, columns: range) -> torch.Tensor:
        if self._order is not None:
            return self._order[slice_of(columns)]
        return torch.arange(columns.start, columns.stop) // self._block_size[1]

    @cached_property
    def _scales(self) -> torch.Tensor:
        """[grid rows, grid columns] float32"""
        suffix = ".weight_scale_inv" if ".weight_scale_inv" in self.parts else ".weight_scale"
        return scale_values(self._grid_of(suffix, SCALES))

    @cached_property
    def _zeros(self) -> torch.Tensor:
        """Like `_scales`."""
        zeros = self._grid_of(".weight_zero_point", ZEROS).to(torch.float32)
        if zeros.shape != self._scales.shape:
            raise self.refuse(
                f"has zeros of the shape {list(zeros.shape)}, but scales of the shape "
                f"{list(self._scales.shape)}"
            )
        return zeros

    @cached_property
    def _order(self) -> torch.Tensor | None:
        """[in] the group of each column; None: groups are neighbours."""
        if ".weight_g_idx" not in self.parts:
            return None
        return self.read_order(".weight_g_idx", self.shape[1], self._scales.shape[1])

    def _grid_of(self, suffix: str, types: Collection[str]) -> torch.Tensor:
        """Returns stored scales or zeros, [grid rows, grid columns]."""
        stored = self.checked(suffix, types, *(None for _ in self.part(suffix).shape)).read_whole()
        if stored.dim() == 4:  # modelopt: [out / b0, 1, in / b1, 1]
            stored = stored.squeeze(3).squeeze(1)
        if stored.numel() == 1 or stored.dim() == 1:
            stored = stored.reshape(-1, 1)
        if stored.dim() != 2:
            raise self.refuse(f"has a tensor {suffix!r} of the shape {list(stored.shape)}")
        return stored

    @cached_property
    def _block_size(self) -> tuple[int, int]:
        """The rows and columns that have one scale."""
        (rows, columns), counts = self.shape, tuple(self._scales.shape)
        found = [self._block] if self._block else [(rows, columns), (1, columns), *BLOCKS]
        for block in found:
            if counts == (-(-rows // block[0]), -(-columns // block[1])):
                return block
        raise self.refuse(
            f"has the shape {[rows, columns]}, but scales of the shape {list(counts)}, for blocks "
            f"of {' or '.join(f'{block[0]} x {block[1]}' for block in found)}"
        )
