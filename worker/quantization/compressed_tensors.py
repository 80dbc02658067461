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
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

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
from swell.worker.quantization.scheme import Scheme, block_size, integer, mapping, refuse_values

ALL = slice(None)
FORMATS = (
    *("dense", "naive-quantized", "float-quantized", "int-quantized", "pack-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision"),
)
ORDERED, UNORDERED = ("group", "dynamic", True), ("weight", "static", False)
"""Values of `actorder`: with the first ones, inputs have any groups."""
BITS = (2, 4, 8)
"""Bits of packed integers, which then never cross the border of a word."""


FUSED = ("weight_input", "weight_output")
"""Locations of transforms that the stored weights already contain."""


class CompressedTensors(Scheme):
    parts = dict.fromkeys(
        (
            *(".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape"),
            *(".weight_g_idx", ".weight_global_scale", ".weight"),
        ),
        ".weight",
    )

    def __init__(self, method: str, config: Mapping[str, Any]) -> None:
        super().__init__(method, config)
        refuse_values(config, {"format": FORMATS})
        refuse_values(mapping(config, "sparsity_config"), {"format": ("dense",)})
        _refuse_online(mapping(config, "transform_config"))
        groups = mapping(config, "config_groups")
        self._groups = [_ModuleGroup.of(mapping(groups, name)) for name in groups]

    def matrix(self, name: str, parts: Parts) -> StoredTensor:
        group = self._group_of(name.removesuffix(".weight"))
        if ".weight_packed" not in parts:
            groups = (1, group.group_size) if group.group_size > 0 else None
            block = group.block or groups
            return ScaledMatrix(name, self.method, parts, block, group.needed)
        if parts[".weight_packed"].stored_type == "U8":
            return Fp4Matrix(name, self.method, parts)
        return PackedMatrix(name, self.method, parts, group)

    def _group_of(self, module: str) -> _ModuleGroup:
        """Returns the group that names a module, otherwise the first that names a class of
        modules."""
        for group in self._groups:
            if group.names(module):
                return group
        of_classes = (group for group in self._groups if group.has_class)
        return next(of_classes, _ModuleGroup((), 0, -1, None, ()))


def _refuse_online(transforms: Mapping[str, Any]) -> None:
    """Raises `ValueError` for a transform that is not fused into the weights: it would have to be
    applied to activations."""
    groups = mapping(transforms, "config_groups")
    for name in groups:
        applied = mapping(groups, name).get("apply")
        for each in applied if isinstance(applied, list) else [applied]:
            location = each.get("location") if isinstance(each, Mapping) else None
            if location not in FUSED:
                raise ValueError(
                    f"transform_config: location={location!r} of {name} (supported: "
                    f"{', '.join(FUSED)}, which are fused into the weights)"
                )


@dataclass(frozen=True)
class _ModuleGroup:
    """Modules with the same format."""

    targets: tuple[str | re.Pattern[str], ...]
    """Names of modules, patterns of names, and classes."""
    bits: int
    group_size: int
    """-1: one group has all inputs."""
    block: tuple[int, int] | None
    needed: tuple[str, ...]
    """The suffixes of tensors that each of their matrices has."""

    @classmethod
    def of(cls, declared: Mapping[str, Any]) -> _ModuleGroup:
        """Raises `ValueError` for values that are not supported."""
        refuse_values(declared, {"format": FORMATS})
        refuse_values(mapping(declared, "weights"), {"actorder": (*ORDERED, *UNORDERED)})
        targets, weights = declared.get("targets") or [], mapping(declared, "weights")
        if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
            raise ValueError(f"targets={targets!r} (names are expected)")
        try:
            found = [
                re.compile(target.removeprefix("re:")) if target.startswith("re:") else target
                for target in targets
            ]
        except re.error as error:
            raise ValueError(f"targets={targets!r} ({error})") from None
        return cls(
            targets=tuple(found),
            bits=integer(weights, "num_bits") or 0,
            group_size=integer(weights, "group_size") or -1,
            block=block_size(weights, "block_structure"),
            needed=_needed(weights),
        )

    @property
    def has_class(self) -> bool:
        return any(isinstance(each, str) and each.isidentifier() for each in self.targets)

    def names(self, module: str) -> bool:
        """Whether a target names the module. Within a wrapper, a module may have a longer name."""
        return any(
            f".{module}".endswith(f".{target}")
            if isinstance(target, str)
            else target.match(module) is not None
            for target in self.targets
        )


def _needed(weights: Mapping[str, Any]) -> tuple[str, ...]:
    if weights.get("type") == "float":
        return ()
    order = weights.get("actorder")
    is_ordered = (order.lower() if isinstance(order, str) else order) in ORDERED
    zeros = (".weight_zero_point",) if weights.get("symmetric") is False else ()
    return (*zeros, ".weight_g_idx") if is_ordered else zeros


class PackedMatrix(GroupedMatrix):
    def __init__(self, name: str, method: str, parts: Parts, group: _ModuleGroup) -> None:
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
