"""GPTQ: integers of 2, 3, 4 or 8 bits, and a scale and a zero for each group of inputs.

    qweight  [in * bits / 32, out] int32, the inputs of one output packed along the first dimension
    qzeros   [groups, out * bits / 32] int32; the first version of the format stores zero - 1
    scales   [groups, out]
    g_idx    [in] int32, the group of each input; inputs ordered by activation have any groups

Symmetric matrices have the middle value as their zero. Some tools store it without subtracting 1,
and still declare the first version; the stored value says which.
"""

from __future__ import annotations

from functools import cached_property

import torch

from swell.configs.quantization.methods import GPTQ_BITS, GptqValues
from swell.worker.checkpoint.checkpoint import StoredTensor
from swell.worker.checkpoint.safetensors_files import FLOATS
from swell.worker.quantization.grouped_matrix import (
    INDICES,
    WORDS,
    Grid,
    GroupedMatrix,
    Parts,
    slice_of,
)
from swell.worker.quantization.packing import unpack_integers
from swell.worker.quantization.scheme import Scheme

ALL = slice(None)


class Gptq(Scheme):
    """The method `gptq`."""

    parts = dict.fromkeys((".qweight", ".qzeros", ".scales", ".g_idx"), ".weight")

    def matrix(self, name: str, parts: Parts) -> StoredTensor:
        return GptqMatrix(name, self.method, parts, self.declared.values)


class GptqMatrix(GroupedMatrix):
    def __init__(self, name: str, method: str, parts: Parts, declared: GptqValues) -> None:
        super().__init__(name, method, parts, (".g_idx",) if declared.is_ordered else ())
        self._declared = declared

    def find_shape(self) -> tuple[int, int]:
        words, rows = self.checked(".qweight", WORDS, None, None).shape
        groups = self.checked(".scales", FLOATS, None, rows).shape[0]
        columns = words * 32 // self.bits
        self.checked(".qzeros", WORDS, groups, -(-rows * self.bits // 32))
        return rows, columns

    @property
    def unit(self) -> tuple[int, int]:  # type: ignore[override]
        numbers = 32 if self.bits == 3 else 32 // self.bits
        return numbers, numbers

    def levels(self, rows: range, columns: range) -> torch.Tensor:
        words = slice(columns.start * self.bits // 32, columns.stop * self.bits // 32)
        packed = self.part(".qweight").read_stored((words, slice_of(rows)))
        return unpack_integers(packed.T, self.bits)

    def grid(self, rows: range) -> Grid:
        scales = self.part(".scales").read_stored((ALL, slice_of(rows)))
        words = slice(rows.start * self.bits // 32, -(-rows.stop * self.bits // 32))
        packed = self.part(".qzeros").read_stored((ALL, words))
        zeros = unpack_integers(packed, self.bits)[:, : len(rows)]
        zeros = (zeros + self._added) & (2**self.bits - 1)
        return Grid(scales.T.to(torch.float32), zeros.T.to(torch.float32))

    def groups(self, columns: range) -> torch.Tensor:
        if self._order is not None:
            return self._order[slice_of(columns)]
        return torch.arange(columns.start, columns.stop) // self._columns_per_group

    @cached_property
    def bits(self) -> int:  # type: ignore[override]
        """The bits of this matrix."""
        words, groups = self.part(".qweight").shape[0], self.part(".scales").shape[0]
        declared, size = self._declared.bits, self._declared.group_size
        has_order = ".g_idx" in self.parts
        inputs = self.checked(".g_idx", INDICES, None).shape[0] if has_order else 0
        for bits in sorted(GPTQ_BITS, key=lambda each: each != declared):
            columns = words * 32 // bits
            if has_order:
                fits = columns == inputs
            elif size > 0:
                fits = -(-columns // size) == groups
            else:
                fits = bits == declared
            if fits and columns * bits == words * 32:
                return bits
        of_inputs = f" and {inputs} inputs" if has_order else ""
        raise self.refuse(
            f"has {words} words for each output{of_inputs}, and {groups} groups of {size}, for "
            f"which no number of bits fits (supported: {', '.join(map(str, GPTQ_BITS))})"
        )

    @cached_property
    def group_size(self) -> int | None:  # type: ignore[override]
        size, order = self._columns_per_group, self._order
        if order is not None and not torch.equal(order, torch.arange(len(order)) // size):
            return None
        return size

    @cached_property
    def _order(self) -> torch.Tensor | None:
        """[in] the group of each column; None: groups are neighbours."""
        if ".g_idx" not in self.parts:
            return None
        return self.read_order(".g_idx", self.shape[1], self.part(".scales").shape[0])

    @cached_property
    def _columns_per_group(self) -> int:
        columns, count = self.shape[1], self.part(".scales").shape[0]
        size = self._declared.group_size
        return size if size > 0 and -(-columns // size) == count else -(-columns // count)

    @cached_property
    def _added(self) -> int:
        """The number that is added to stored zeros."""
        if self._declared.is_second_version:
            return 0
        if self._declared.is_symmetric:
            zeros = unpack_integers(self.part(".qzeros").read_whole(), self.bits)
            return 0 if bool((zeros == 2 ** (self.bits - 1)).all()) else 1
        return 1
