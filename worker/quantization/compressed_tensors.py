"""The method `compressed-tensors` of llm-compressor, which has several formats.

    float-quantized, int-quantized   `weight` of 8 bits, see `fp8.py`
    pack-quantized                   integers of 2, 4 or 8 bits, packed along the inputs:
        weight_packed      [out, in * bits / 32] int32
        weight_scale       [out, groups]
        weight_zero_point  [out * bits / 32, groups] int32, or like `weight_scale`; if asymmetric
        weight_shape       out, in
        weight_g_idx       [in], the group of each input, if they are ordered by activation
    nvfp4, mxfp4-pack-quantized      see `fp4.py`

Stored integers are signed; packed ones have 2 ** (bits - 1) added. A config has groups of
matrices, each with its own format.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from itertools import chain

import torch

from swell.configs.quantization.methods import ModuleGroup
from swell.worker.checkpoint.checkpoint import StoredTensor
from swell.worker.checkpoint.safetensors_files import FLOATS
from swell.worker.quantization.fp4 import Fp4Matrix
from swell.worker.quantization.fp8 import ScaledMatrix
from swell.worker.quantization.grouped_matrix import (
    INDICES,
    WORDS,
    ZEROS,
    Grid,
    GroupedMatrix,
    Parts,
    slice_of,
)
from swell.worker.quantization.packing import unpack_integers
from swell.worker.quantization.scheme import Scheme

ALL = slice(None)
BITS = (2, 4, 8)
"""Bits of packed integers, which then never cross the border of a word."""

EMBEDDINGS = ("embed_tokens", "embed_in", "word_embeddings", "wte")
"""Names of modules whose class is `Embedding`; those of other matrices are `Linear`."""


class CompressedTensors(Scheme):
    parts = dict.fromkeys(
        (
            *(".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape"),
            *(".weight_g_idx", ".weight_global_scale", ".weight"),
        ),
        ".weight",
    )

    def matrix(self, name: str, parts: Parts) -> StoredTensor:
        group = self._group_of(name.removesuffix(".weight"))
        if ".weight_packed" not in parts:
            groups = (1, group.group_size) if group.group_size > 0 else None
            block = group.block or groups
            return ScaledMatrix(name, self.method, parts, block, group.needed)
        if parts[".weight_packed"].stored_type == "U8":
            return Fp4Matrix(name, self.method, parts)
        return PackedMatrix(name, self.method, parts, group)

    def _group_of(self, module: str) -> ModuleGroup:
        """Returns the group of a module as compressed-tensors finds it, in any order of the groups:
        by a name, otherwise by the first pattern in alphabetical order, otherwise by a class.
        Within a wrapper a module may have a longer name than its target."""
        places = module.split(".")
        names = (".".join(places[i:]) for i in range(len(places)))
        patterns = (each for each in self._patterns if each.match(module))
        of_module = "Embedding" if places[-1] in EMBEDDINGS else "Linear"
        classes = (of_module, *self._classes)
        targets: Iterable[str | re.Pattern[str]] = chain(names, patterns, classes)
        found = (self._groups[target] for target in targets if target in self._groups)
        return next(found, ModuleGroup())

    @cached_property
    def _groups(self) -> dict[str | re.Pattern[str], ModuleGroup]:
        """Target -> its group; if several groups have a target, the last of them."""
        groups: tuple[ModuleGroup, ...] = self.declared.values
        return {target: group for group in groups for target in group.targets}

    @cached_property
    def _patterns(self) -> list[re.Pattern[str]]:
        patterns = [target for target in self._groups if isinstance(target, re.Pattern)]
        return sorted(patterns, key=lambda each: each.pattern)

    @cached_property
    def _classes(self) -> list[str]:
        """The targets that may be classes of modules. The stored tensors do not have these."""
        names = [target for target in self._groups if isinstance(target, str)]
        return sorted(each for each in names if each.isidentifier())


class PackedMatrix(GroupedMatrix):
    def __init__(self, name: str, method: str, parts: Parts, group: ModuleGroup) -> None:
        super().__init__(name, method, parts, group.needed)
        self._group = group

    def find_shape(self) -> tuple[int, int]:
        stored = self.checked(".weight_shape", INDICES, 2).read_whole()
        rows, columns = (int(each) for each in stored)
        bits = self._group.bits
        words = self.checked(".weight_packed", WORDS, rows, None).shape[1]
        if bits not in BITS or words != -(-columns * bits // 32):
            raise self.refuse(
                f"has {columns} inputs in {words} words, which are not {bits} bits each "
                f"(supported: {', '.join(map(str, BITS))} bits)"
            )
        groups = self.checked(".weight_scale", FLOATS, rows, None).shape[1]
        size = self._group.group_size
        if groups != (-(-columns // size) if size > 0 else 1):
            raise self.refuse(f"has {columns} inputs and {groups} groups of {size}")
        if (zeros := self.parts.get(".weight_zero_point")) is not None:
            if zeros.shape == (rows, groups):
                self.checked(".weight_zero_point", ZEROS, rows, groups)
            else:
                self.checked(".weight_zero_point", WORDS, -(-rows * bits // 32), groups)
        return rows, columns

    @property
    def unit(self) -> tuple[int, int]:  # type: ignore[override]
        return self._per_word, self._per_word

    def levels(self, rows: range, columns: range) -> torch.Tensor:
        words = slice_of(columns, self._per_word)
        packed = self.part(".weight_packed").read_stored((slice_of(rows), words))
        return unpack_integers(packed, self.bits)[:, : len(columns)]

    def grid(self, rows: range) -> Grid:
        stored, middle = self.part(".weight_scale"), 2 ** (self.bits - 1)
        scales = stored.read_stored((slice_of(rows), ALL)).to(torch.float32)
        if ".weight_zero_point" not in self.parts:
            return Grid(scales, float(middle))
        zeros = self.part(".weight_zero_point")
        if zeros.shape == stored.shape:  # not packed, so without the addend
            read = zeros.read_stored((slice_of(rows), ALL)).to(torch.float32)
            return Grid(scales, read + middle)
        packed = zeros.read_stored((slice_of(rows, self._per_word), ALL))
        unpacked = unpack_integers(packed.T, self.bits)[:, : len(rows)].T
        return Grid(scales, unpacked.to(torch.float32))

    def groups(self, columns: range) -> torch.Tensor:
        if self._order is not None:
            return self._order[slice_of(columns)]
        return torch.arange(columns.start, columns.stop) // self._columns_per_group

    @property
    def group_size(self) -> int | None:  # type: ignore[override]
        return self._columns_per_group if self._order is None else None

    @cached_property
    def _order(self) -> torch.Tensor | None:
        """[in] the group of each column; None: groups are neighbours."""
        if ".weight_g_idx" not in self.parts:
            return None
        return self.read_order(".weight_g_idx", self.shape[1], self.part(".weight_scale").shape[1])

    @property
    def bits(self) -> int:  # type: ignore[override]
        return self._group.bits

    @property
    def _per_word(self) -> int:
        return 32 // self.bits

    @property
    def _columns_per_group(self) -> int:
        size = self._group.group_size
        return size if size > 0 else self.shape[1]
