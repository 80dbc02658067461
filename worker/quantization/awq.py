"""AWQ: integers of 4 bits, and a scale and a zero for each group of inputs.

    qweight  [in, out / 8] int32, 8 outputs in each word
    qzeros   [groups, out / 8] int32, packed like `qweight`
    scales   [groups, out]

The outputs within a word are interleaved: from the lowest bits, they are 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from functools import cached_property

import torch

from swell.worker.checkpoint.checkpoint import StoredTensor
from swell.worker.checkpoint.safetensors_files import FLOATS
from swell.worker.quantization.grouped_matrix import (
    WORDS,
    Grid,
    GroupedMatrix,
    Parts,
    slice_of,
)
from swell.worker.quantization.packing import unpack_integers
from swell.worker.quantization.scheme import Scheme

ALL = slice(None)
PER_WORD = 8


class Awq(Scheme):
    """The method `awq`, with the layout of the version `gemm`."""

    parts = dict.fromkeys((".qweight", ".qzeros", ".scales"), ".weight")

    def matrix(self, name: str, parts: Parts) -> StoredTensor:
        return AwqMatrix(name, self.method, parts)


class AwqMatrix(GroupedMatrix):
    unit = (PER_WORD, 1)
    bits = 4

    def find_shape(self) -> tuple[int, int]:
        columns, words = self.checked(".qweight", WORDS, None, None).shape
        rows = words * PER_WORD
        groups = self.checked(".scales", FLOATS, None, rows).shape[0]
        self.checked(".qzeros", WORDS, groups, words)
        if columns % groups:
            raise self.refuse(f"has {columns} inputs, but {groups} groups")
        return rows, columns

    def levels(self, rows: range, columns: range) -> torch.Tensor:
        words = slice_of(rows, PER_WORD)
        return _numbers(
            self.part(".qweight").read_stored((slice_of(columns), words))
        ).T.contiguous()

    def grid(self, rows: range) -> Grid:
        zeros = _numbers(self.part(".qzeros").read_stored((ALL, slice_of(rows, PER_WORD))))
        scales = self.part(".scales").read_stored((ALL, slice_of(rows)))
        return Grid(scales.T.to(torch.float32), zeros.T.to(torch.float32))

    def groups(self, columns: range) -> torch.Tensor:
        return torch.arange(columns.start, columns.stop) // self.group_size

    @cached_property
    def group_size(self) -> int:  # type: ignore[override]
        return self.shape[1] // self.part(".scales").shape[0]


def _numbers(words: torch.Tensor) -> torch.Tensor:
    """words [N, W] int32 -> [N, 8 W] uint8, in the order of the outputs"""
    numbers = unpack_integers(words, 4)
    return numbers.unflatten(-1, (-1, 2, 4)).transpose(-1, -2).flatten(-3)
