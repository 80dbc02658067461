"""Layers with one large matrix, which a backend may store in its own order, or quantized."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from swell.configs.schema import ModelConfig
from swell.kernels.linear import PackedTensor, Weight, pack, pack_quantized
from swell.kernels.weights.quantized import GROUP, PackedQuantizedTensor, quantize
from swell.worker.model_interfaces import HoldsTensors

HEAD_BITS = 8
"""The bits of a quantized head, and of the embedding that shares its weight. Every token depends on
them, and their rows are the same for all layers, so 4 bits would cost more than they save."""
_BITS = {"none": None, "keep": None, "int8": 8, "int4": 4}
_OR_NOT = "or set model.quantize=none"


@dataclass(frozen=True)
class Packing:
    """How the weights of a model are stored for its products."""

    exact: bool = False
    """See `swell.kernels.linear.pack`."""
    bits: int | None = None
    """The bits of quantized weights; None: weights are not quantized after they are loaded."""
    keeps_integers: bool = False
    """Whether the weights of quantized checkpoints keep their integers."""
    integer_activations: bool = False
    """See `swell.kernels.linear.pack_quantized`."""

    @classmethod
    def of(cls, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Packing:
        """Raises `ValueError` if the device cannot compute with such weights."""
        packing = cls(
            exact=config.exact,
            bits=_BITS[config.quantize],
            keeps_integers=config.quantize == "keep",
            integer_activations=config.activations == "int8",
        )
        if packing.is_quantized:
            _refuse_unsupported(config, device, dtype)
        return packing

    @property
    def is_quantized(self) -> bool:
        return self.bits is not None or self.keeps_integers


FLOATS = Packing()


def _refuse_unsupported(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Raises `ValueError` if the device cannot compute with quantized weights in this way."""
    if device.type == "cpu" and dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"model.quantize={config.quantize} needs model.dtype=float32 or bfloat16 on CPUs, but "
            f"the type of this model is {str(dtype).removeprefix('torch.')}; set model.dtype, "
            f"{_OR_NOT}"
        )
    if device.type != "cpu" and config.activations == "int8":
        raise ValueError(
            "model.activations=int8: only CPUs round activations, because GPUs would not be faster "
            "with it; set model.activations=exact"
        )


class Packable(nn.Module):
    """A layer whose weights are packed once they are loaded."""

    def pack(self, packing: Packing) -> None:
        """Replaces loaded weights by their packed form."""
        raise NotImplementedError


class PackedWeight(Packable):
    """A layer with a `weight` [out, in]."""

    weight: Any
    """A parameter while it is loaded, then a `Weight` of `swell.kernels.linear`."""

    def pack(self, packing: Packing) -> None:
        weight, bits = self.weight, self.quantized_bits(packing)
        if bits is not None:
            plain = weight.unpack() if isinstance(weight, PackedTensor) else weight
            quantized = quantize(plain, bits)
            self.replace(pack_quantized(quantized, plain.dtype, packing.integer_activations))
        elif not isinstance(weight, PackedTensor):
            self.replace(pack(weight, packing.exact))

    @property
    def may_be_packed(self) -> bool:
        """Whether the weight is read only by products and lookups of our kernels."""
        return True

    def quantized_bits(self, packing: Packing) -> int | None:
        """Returns the bits of this layer's weight; None: it is not quantized."""
        return packing.bits

    def replace(self, weight: Weight) -> None:
        """Uses `weight` from now on."""
        del self.weight
        self.weight = weight


class QuantizedBytes(NamedTuple):
    """The sizes of all weights that were quantized."""

    before: int
    after: int


def pack_weights(model: HoldsTensors, packing: Packing = FLOATS) -> QuantizedBytes:
    """Packs every weight of a loaded model that is not packed yet, and those that several modules
    share once. Afterwards the model cannot be loaded again."""
    before = after = 0
    by_weight: dict[int, list[PackedWeight]] = defaultdict(list)
    for module in model.modules():
        if isinstance(module, PackedWeight):
            by_weight[id(module.weight)].append(module)
        elif isinstance(module, Packable):
            module.pack(packing)
    for sharing in by_weight.values():
        if not isinstance(sharing[0].weight, PackedQuantizedTensor):
            quantized = pack_layers(model, sharing, packing)
            before, after = before + quantized.before, after + quantized.after
    return QuantizedBytes(before, after)


def pack_layers(
    model: HoldsTensors, sharing: Sequence[PackedWeight], packing: Packing
) -> QuantizedBytes:
    """Packs the weight that layers of a model share, unless all of them use it as it is."""
    before_bytes = sharing[0].weight.data.nbytes
    for layer in sharing:
        try:
            layer.pack(packing)
        except ValueError as error:
            name = next(name for name, each in model.named_modules() if each is layer)
            raise ValueError(
                f"model.quantize: the matrix of {name}: {error}; copy or download the weights "
                f"again, {_OR_NOT}"
            ) from None
        if not isinstance(packed := layer.weight, torch.Tensor):
            for other in sharing:
                if other.weight is not packed:
                    other.replace(packed)
            if isinstance(packed, PackedQuantizedTensor):
                return QuantizedBytes(before_bytes, packed.data.nbytes)
            break
    return QuantizedBytes(0, 0)


def refuse_unquantizable(model: HoldsTensors, packing: Packing) -> None:
    """Raises `ValueError` if a weight to be quantized does not consist of whole groups."""
    if packing.bits is None:
        return
    for name, module in model.named_modules():
        if not isinstance(module, PackedWeight) or not module.may_be_packed:
            continue
        if module.quantized_bits(packing) is None:
            continue
        inputs = module.weight.shape[1]
        if inputs % GROUP:
            raise ValueError(
                f"model.quantize: the matrix of {name} has {inputs} inputs in each worker, but "
                f"{GROUP} neighbouring inputs share a scale; use another parallel.tensor if that "
                f"makes it a multiple of {GROUP}, {_OR_NOT}"
            )
