"""Keeps the integers of quantized checkpoints for products: their weights are not dequantized."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from swell.kernels.linear import pack_quantized
from swell.kernels.weights.quantized import QuantizedTensor
from swell.worker.checkpoint.checkpoint import HasIntegers, StoredTensor
from swell.worker.layers.packed_weight import PackedWeight, Packing, QuantizedBytes
from swell.worker.layers.weight_shard import WeightShard
from swell.worker.model_interfaces import HoldsTensors

Needed = tuple[StoredTensor, WeightShard]


def keep_integers(
    model: HoldsTensors, packing: Packing, needed: Sequence[Needed], report: Callable[[int], None]
) -> tuple[list[Needed], QuantizedBytes]:
    """Replaces the weights of layers whose shards are all stored as integers that products can use;
    returns the shards that are still to be read. `report` is called with the bytes of each filled
    target."""
    layers: defaultdict[int, list[PackedWeight]] = defaultdict(list)
    for module in model.modules():
        if isinstance(module, PackedWeight) and module.may_be_packed:
            layers[_memory(module.weight)].append(module)
    of_layers: defaultdict[int, list[Needed]] = defaultdict(list)
    remaining: list[Needed] = []
    for tensor, shard in needed:
        memory = _memory(shard.target)
        (of_layers[memory] if memory in layers else remaining).append((tensor, shard))
    before = after = 0
    for memory, shards in of_layers.items():
        weight = layers[memory][0].weight
        quantized = _joined(weight, shards)
        if quantized is None:
            remaining += shards
            continue
        packed = pack_quantized(quantized, weight.dtype, packing.integer_activations)
        for module in layers[memory]:
            module.replace(packed)
        before, after = before + weight.nbytes, after + packed.data.nbytes
        report(sum(shard.target.nbytes for _, shard in shards))
    return remaining, QuantizedBytes(before, after)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _joined(weight: torch.Tensor, shards: Sequence[Needed]) -> QuantizedTensor | None:
    """Returns the weight that shards of some of its rows make; None if they do not have one form,
    or do not fill it."""
    parts: list[QuantizedTensor] = []
    row = 0
    for tensor, shard in sorted(shards, key=lambda pair: pair[1].target.storage_offset()):
        is_next = shard.target.storage_offset() == row * weight.shape[1]
        is_whole = tensor.shape == tuple(shard.shape) and shard.target.shape[1:] == weight.shape[1:]
        if not (is_next and is_whole and isinstance(tensor, HasIntegers)):
            return None
        part = tensor.read_quantized(shard.index)
        if part is None:
            return None
        parts.append(part)
        row += len(part.integers)
    forms = {(part.bits, part.scales.shape[1]) for part in parts}
    if row != weight.shape[0] or len(forms) != 1:
        return None
    mins = None
    if any(part.mins is not None for part in parts):
        mins = torch.cat([_mins(part) for part in parts])
    scales = torch.cat([part.scales for part in parts])
    half = scales.to(torch.float16)
    if mins is None and torch.equal(half.to(torch.float32), scales):
        scales = half
    integers = torch.cat([part.integers for part in parts])
    return QuantizedTensor(integers, scales, mins, parts[0].bits)


def _mins(part: QuantizedTensor) -> torch.Tensor:
    return -part.form.zero * part.scales if part.mins is None else part.mins
