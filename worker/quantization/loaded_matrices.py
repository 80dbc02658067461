"""Quantizes the matrices of a model while they are loaded.

Each gets its memory before its shards are filled, and is quantized as soon as they are, so that
only one matrix at a time is in memory as floats. Integers of quantized checkpoints are kept where
products can use them: these matrices are never floats.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn

from swell.configs.runtime.log import StructuredLogger
from swell.kernels.linear import numbers
from swell.kernels.weights.quantized import Numbers, PackedQuantizedTensor, QuantizedTensor
from swell.worker.checkpoint.checkpoint import HasIntegers, StoredTensor
from swell.worker.layers.moe import ExpertWeight
from swell.worker.layers.packed_weight import (
    Matrix,
    NamedMatrix,
    Packing,
    QuantizedBytes,
    named_matrices,
    pack_shared,
    pack_weights,
)
from swell.worker.layers.weight_shard import WeightShard
from swell.worker.memory.host_memory import trim_heap
from swell.worker.memory.uploads import Uploads
from swell.worker.model_interfaces import HoldsTensors

TRIM_BYTES = 16 * 2**20
"""The most bytes of freed floats that the heap may keep."""

Needed = tuple[StoredTensor, WeightShard]


class LoadedMatrices:
    """The matrices of a model that stay floats while they are loaded."""

    quantized = QuantizedBytes(0, 0)
    """The sizes of the matrices that were quantized so far."""

    def group(self, shards: Sequence[WeightShard]) -> list[list[WeightShard]]:
        """Returns the shards in groups: those of one matrix that is quantized are one group."""
        return [[shard] for shard in shards]

    def keep(self, needed: Sequence[Needed], uploads: Uploads) -> bool:
        """Whether the integers of a group's tensors became the weight of its layers, so that the
        shards need not be filled."""
        return False

    def allocate(self, shards: Sequence[WeightShard]) -> Sequence[WeightShard]:
        """Allocates the matrix of a group if it is on the meta device; returns the shards with
        memory."""
        return shards

    def on_filled(self, shards: Sequence[WeightShard]) -> None:
        """Quantizes the matrix of a group, as it was before `allocate`, if it has one."""

    def allocate_rest(self) -> None:
        """Allocates matrices that no shard fills: a rank may hold only padding of the
        vocabulary."""

    def quantize_rest(self, model: HoldsTensors) -> None:
        """Quantizes the matrices of a model that were loaded as floats."""

    def log(self, model: HoldsTensors, log: StructuredLogger) -> None:
        """Logs how many matrices of a model have which form, if any should be quantized."""


FLOAT_MATRICES = LoadedMatrices()


class QuantizedMatrices(LoadedMatrices):
    """The matrices of a model that are quantized while they are loaded."""

    def __init__(
        self, matrices: Iterable[NamedMatrix], packing: Packing, device: torch.device
    ) -> None:
        self._packing, self._device = packing, device
        self._reasons: dict[str, str] = {}
        """Name of a matrix -> why it does not use integers of the checkpoint."""
        self._freed_bytes = 0
        """The bytes of the floats that were freed since the heap was trimmed."""
        self._sharing: defaultdict[int, list[NamedMatrix]] = defaultdict(list)
        """Storage of a weight before it is loaded -> the matrices that share it."""
        for named in matrices:
            if named.matrix.may_be_quantized:
                self._sharing[_storage(named.matrix.weight)].append(named)

    def group(self, shards: Sequence[WeightShard]) -> list[list[WeightShard]]:
        groups: list[list[WeightShard]] = []
        of_matrices: dict[int, list[WeightShard]] = {}
        for shard in shards:
            storage = _storage(shard.target)
            if storage not in self._sharing:
                groups.append([shard])
            elif storage in of_matrices:
                of_matrices[storage].append(shard)
            else:
                groups.append(of_matrices.setdefault(storage, [shard]))
        return groups

    def keep(self, needed: Sequence[Needed], uploads: Uploads) -> bool:
        sharing = self._sharing.get(_storage(needed[0][1].target))
        if sharing is None or not self._packing.keeps_integers:
            return False
        weight = sharing[0].matrix.weight
        integers = _joined(weight, needed, numbers(self._device.type))
        if isinstance(integers, str):
            self._reasons.update((name, integers) for name, _ in sharing)
            return False
        mins = integers.mins
        integers = replace(
            integers,
            integers=uploads.upload(integers.integers, self._device),
            scales=uploads.upload(integers.scales, self._device),
            mins=None if mins is None else uploads.upload(mins, self._device),
        )
        packed = self._packing.pack(integers, weight.dtype)
        for _, matrix in sharing:
            matrix.replace(packed)
        self._count(QuantizedBytes(weight.nbytes, packed.data.nbytes))
        return True

    def allocate(self, shards: Sequence[WeightShard]) -> Sequence[WeightShard]:
        sharing = self._sharing.get(_storage(shards[0].target))
        if sharing is None or not sharing[0].matrix.weight.is_meta:
            return shards
        weight = self._allocate(sharing)
        return [shard.within(weight) for shard in shards]

    def on_filled(self, shards: Sequence[WeightShard]) -> None:
        sharing = self._sharing.get(_storage(shards[0].target))
        if sharing is not None and self._packing.bits is not None:
            self._count(pack_shared(sharing, self._packing))

    def allocate_rest(self) -> None:
        for sharing in self._sharing.values():
            weight = sharing[0].matrix.weight
            if isinstance(weight, torch.Tensor) and weight.is_meta:
                self._allocate(sharing)

    def quantize_rest(self, model: HoldsTensors) -> None:
        self._count(pack_weights(model, self._packing))

    def _allocate(self, sharing: Sequence[NamedMatrix]) -> nn.Parameter:
        data = torch.empty_like(sharing[0].matrix.weight, device=self._device)
        weight = nn.Parameter(data, requires_grad=False)
        for _, matrix in sharing:
            matrix.replace(weight)
        return weight

    def log(self, model: HoldsTensors, log: StructuredLogger) -> None:
        forms: Counter[str] = Counter()
        plain: Counter[str] = Counter()
        weights: set[int] = set()
        for name, matrix in named_matrices(model):
            weight = matrix.weight
            if id(weight) in weights:
                continue
            weights.add(id(weight))
            if isinstance(weight, PackedQuantizedTensor):
                rounded = ", inputs rounded" if weight.rounded_activations else ""
                forms[f"{weight.form}{rounded}"] += 1
            else:
                plain[self._why_plain(name, matrix)] += 1
        log.info("matrices that are quantized", forms=_counts(forms), plain=_counts(plain))

    def _why_plain(self, name: str, matrix: Matrix) -> str:
        if not matrix.may_be_quantized:
            is_expert = isinstance(matrix, ExpertWeight)
            return "experts on a GPU" if is_expert else "read by other code of the model"
        if self._packing.bits is not None and matrix.quantized_bits(self._packing) is None:
            return f"never quantized ({type(matrix).__name__})"
        return self._reasons.get(name, "stored as floats")

    def _count(self, quantized: QuantizedBytes) -> None:
        before, after = self.quantized
        self.quantized = QuantizedBytes(before + quantized.before, after + quantized.after)
        self._freed_bytes += quantized.before
        if self._freed_bytes >= TRIM_BYTES:
            self._freed_bytes = 0
            trim_heap()


def matrices_to_load(
    matrices: Iterable[NamedMatrix], packing: Packing, device: torch.device
) -> LoadedMatrices:
    """Returns the object that quantizes these matrices of `device` while they are loaded, or does
    not."""
    return QuantizedMatrices(matrices, packing, device) if packing.is_quantized else FLOAT_MATRICES


def _counts(found: Counter[str]) -> list[str]:
    return [f"{count} {what}" for what, count in found.most_common() if count]


def _storage(tensor: torch.Tensor) -> int:
    """Returns a number that tensors share if and only if they share memory, or will share it."""
    return tensor.untyped_storage()._cdata


def _joined(
    weight: torch.Tensor, shards: Sequence[Needed], computed: Collection[Numbers]
) -> QuantizedTensor | str:
    """Returns the weight that shards of some of its rows make; or why they do not make one.
    `computed`: see `HasIntegers.read_quantized`."""
    parts: list[QuantizedTensor] = []
    row = 0
    for tensor, shard in sorted(shards, key=lambda pair: pair[1].target.storage_offset()):
        is_next = shard.target.storage_offset() == row * weight.shape[1]
        is_whole = tensor.shape == tuple(shard.shape) and shard.target.shape[1:] == weight.shape[1:]
        is_whole &= shard.target.is_contiguous()  # not transposed
        if not isinstance(tensor, HasIntegers):
            return "stored as floats"
        if not (is_next and is_whole):
            return "joined otherwise than by rows"
        part = tensor.read_quantized(shard.index, computed)
        if isinstance(part, str):
            return part
        parts.append(part)
        row += len(part.integers)
    if row != weight.shape[0]:
        return "joined otherwise than by rows"
    if len({part.bits for part in parts}) > 1:
        return "joined of matrices with 4 and 8 bits"
    if len({part.numbers for part in parts}) > 1:
        return "joined of matrices with integers and floats"
    parts = _in_equal_groups(parts)
    mins = None
    if any(part.mins is not None for part in parts):
        mins = torch.cat([_mins(part) for part in parts])
    scales = torch.cat([part.scales for part in parts])
    half = scales.to(torch.float16)
    if mins is None and torch.equal(half.to(torch.float32), scales):
        scales = half
    integers = torch.cat([part.integers for part in parts])
    return replace(parts[0], integers=integers, scales=scales, mins=mins)


def _in_equal_groups(parts: Sequence[QuantizedTensor]) -> list[QuantizedTensor]:
    """Divides groups into smaller ones with one scale, until all parts have groups of one size: all
    sizes are powers of two."""
    groups = max(part.scales.shape[1] for part in parts)
    return [
        replace(
            part,
            scales=part.scales.repeat_interleave(groups // part.scales.shape[1], 1),
            mins=None
            if part.mins is None
            else part.mins.repeat_interleave(groups // part.scales.shape[1], 1),
        )
        for part in parts
    ]


def _mins(part: QuantizedTensor) -> torch.Tensor:
    return -part.form.zero * part.scales if part.mins is None else part.mins
