"""GPTQ: integers of 2, 3, 4 or 8 bits, and a scale and a zero for each group of inputs.

    qweight  [in * bits / 32, out] int32, the inputs of one output packed along the first dimension
    qzeros   [groups, out * bits / 32] int32; the first version of the format stores zero - 1
    scales   [groups, out]
    g_idx    [in] int32, the group of each input; inputs ordered by activation have any groups

Symmetric matrices have the middle value as their zero. Some tools store it without subtracting 1,
and still declare the first version; the stored value says which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from swell.worker.checkpoint.checkpoint import StoredTensor
from swell.worker.quantization.grouped_matrix import Grid, GroupedMatrix, Parts, slice_of
from swell.worker.quantization.packing import unpack_integers
from swell.worker.quantization.scheme import Scheme, integer, refuse_values

ALL = slice(None)
BITS = (2, 3, 4, 8)


class Gptq(Scheme):
    """The method `gptq`."""

    parts = dict.fromkeys((".qweight", ".qzeros", ".scales", ".g_idx"), ".weight")

    def __init__(self, method: str, config: Mapping[str, Any]) -> None:
        super().__init__(method, config)
        refuse_values(config, {"bits": BITS, "checkpoint_format": ("gptq", "gptq_v2")})
        self._declared = _Declared(
            bits=integer(config, "bits") or 0,
            group_size=integer(config, "group_size") or -1,
            is_symmetric=bool(config.get("sym")),
            is_second_version=str(config.get("checkpoint_format")).lower() == "gptq_v2",
        )

    def matrix(self, name: str, parts: Parts) -> StoredTensor:
        return GptqMatrix(name, self.method, parts, self._declared)


@dataclass(frozen=True)
class _Declared:
    """The values of the config. Some matrices may have other bits and groups."""

    bits: int
    group_size: int
    """-1: one group has all inputs."""
    is_symmetric: bool
    is_second_version: bool


class GptqMatrix(GroupedMatrix):
    def __init__(self, name: str, method: str, parts: Parts, declared: _Declared) -> None:
        super().__init__(name, method, parts)
        self._declared = declared

    @cached_property
    def shape(self) -> tuple[int, ...]:
        qweight, scales = self.part(".qweight"), self.part(".scales")
        if qweight.stored_type != "I32" or len(qweight.shape) != 2:
            raise self.refuse(
                f"has a qweight of type {qweight.stored_type} and shape {list(qweight.shape)}"
            )
        words, rows = qweight.shape
        columns = words * 32 // self.bits
        if scales.shape[1] != rows or words * 32 != columns * self.bits:
            raise self.refuse(
                f"has a qweight of shape {list(qweight.shape)}, but scales of shape "
                f"{list(scales.shape)}, for {self.bits} bits"
            )
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
        if ".g_idx" in self.parts:
            return self.part(".g_idx").read_stored((slice_of(columns),)).long()
        return torch.arange(columns.start, columns.stop) // self._columns_per_group

    @cached_property
    def bits(self) -> int:  # type: ignore[override]
        """The bits of this matrix."""
        words, groups = self.part(".qweight").shape[0], self.part(".scales").shape[0]
        size = self._declared.group_size
        columns = groups * size if size > 0 else 0
        if ".g_idx" in self.parts:
            columns = self.part(".g_idx").shape[0]
        found = words * 32 // columns if columns else self._declared.bits
        if found not in BITS:
            raise self.refuse(f"has {found} bits; only {', '.join(map(str, BITS))} are supported")
        return found

    @cached_property
    def group_size(self) -> int | None:  # type: ignore[override]
        size = self._columns_per_group
        if ".g_idx" in self.parts:
            groups = self.part(".g_idx").read_whole()
            if not torch.equal(groups.long(), torch.arange(len(groups)) // size):
                return None
        return size

    @property
    def _columns_per_group(self) -> int:
        return -(-self.shape[1] // self.part(".scales").shape[0])

    @cached_property
    def _added(self) -> int:
        """The number that is added to stored zeros."""
        if self._declared.is_second_version:
            return 0
        if self._declared.is_symmetric:
            zeros = unpack_integers(self.part(".qzeros").read_whole(), self.bits)
            return 0 if bool((zeros == 2 ** (self.bits - 1)).all()) else 1
        return 1
