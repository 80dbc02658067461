"""Layers with one large matrix, which a backend may store in its own order, or quantized."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from swell.configs.schema import ModelConfig
from swell.kernels.linear import PackedTensor, Weight, pack, pack_quantized
from swell.kernels.weights.quantized import (
    GROUP,
    GROUPS,
    PackedQuantizedTensor,
    QuantizedTensor,
    quantize,
)
from swell.worker.model_interfaces import HoldsTensors

HEAD_BITS = 8
"""The bits of a quantized head, and of the embedding that shares its weight. Every token depends on
them, and their rows are the same for all layers, so 4 bits would cost more than they save."""
_MEASURED_GROUP = 64
"""The largest group of inputs with which rounded inputs change the perplexity of all measured
models by less than 0.5 % (docs/tune/quantization.md). A larger group has a coarser scale."""
_BITS = {"none": None, "keep": None, "int8": 8, "int4": 4}
FP8_GPU = (8, 9)
"""The oldest compute capability with products of FP8 numbers."""
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
    rounded_group: int = 0
    """Inputs of quantized weights are rounded to 8 bits if their groups are not larger."""

    @classmethod
    def of(cls, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Packing:
        """Raises `ValueError` if the device cannot compute with such weights."""
        packing = cls(
            exact=config.exact,
            bits=_BITS[config.quantize],
            keeps_integers=config.quantize == "keep",
            rounded_group=_rounded_group(config, device),
        )
        if packing.is_quantized:
            _refuse_unsupported(config, device, dtype)
        return packing

    @property
    def is_quantized(self) -> bool:
        return self.bits is not None or self.keeps_integers

    def pack(self, weight: QuantizedTensor, dtype: torch.dtype) -> PackedQuantizedTensor:
        """Packs a quantized weight for products with `dtype`."""
        return pack_quantized(weight, dtype, weight.form.group <= self.rounded_group)


FLOATS = Packing()


def _rounded_group(config: ModelConfig, device: torch.device) -> int:
    """Returns the largest group whose inputs `model.activations` rounds."""
    if config.activations == "auto":
        return _MEASURED_GROUP if device.type == "cpu" else 0
    return 0 if config.activations == "exact" else GROUPS[-1]


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
            "model.activations=int8: only CPUs round activations to integers, because GPUs would "
            "not be faster with it; set model.activations=exact"
        )
    if config.activations == "fp8" and (why := _why_not_fp8(config, device, dtype)):
        raise ValueError(f"model.activations=fp8 {why}, or set model.activations=exact")


def _why_not_fp8(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns why products cannot round activations to E4M3, with the way out; None: they can."""
    if device.type != "cuda":
        return f"needs a GPU, but model.device is {device.type}; set model.device=cuda"
    if torch.cuda.get_device_capability(device) < FP8_GPU:
        major, minor = torch.cuda.get_device_capability(device)
        return (
            f"needs a GPU of compute capability {FP8_GPU[0]}.{FP8_GPU[1]} or later, but this one "
            f"has {major}.{minor}; use another GPU"
        )
    if config.quantize != "keep":
        return (
            f"needs the FP8 weights of a checkpoint, but model.quantize={config.quantize}; set "
            "model.quantize=keep"
        )
    if dtype != torch.bfloat16:
        return (
            f"needs model.dtype=bfloat16, but the type of this model is "
            f"{str(dtype).removeprefix('torch.')}; set model.dtype=bfloat16"
        )
    if config.exact:
        return "has no answers for model.exact: its products depend on the batch; set it to false"
    return None


class Matrix(Protocol):
    """A weight [out, in] of a layer, which may be packed."""

    @property
    def weight(self) -> Any:
        """A plain tensor while it is loaded, then a `Weight` of `swell.kernels.linear`."""

    @property
    def may_be_quantized(self) -> bool:
        """Whether the weight is read only by products and lookups of our kernels that take
        quantized weights."""

    def quantized_bits(self, packing: Packing) -> int | None:
        """Returns the bits of this weight; None: it is not quantized."""

    def pack(self, packing: Packing) -> None:
        """Replaces the loaded weight by its packed form."""

    def replace(self, weight: Weight) -> None:
        """Uses `weight` from now on."""


class Packable(nn.Module):
    """A layer whose weights are packed once they are loaded."""

    def matrices(self) -> Iterable[tuple[str, Matrix]]:
        """Returns the weights, with their names in the layer."""
        raise NotImplementedError

    def quantized_inputs(self, packing: Packing) -> Iterable[tuple[str, int]]:
        """Returns the number of inputs of each weight that is quantized, with its name in the
        layer; also of weights that come later."""
        for name, matrix in self.matrices():
            if matrix.may_be_quantized and matrix.quantized_bits(packing) is not None:
                yield name, matrix.weight.shape[1]

    def on_packed(self, packing: Packing) -> None:
        """Called after all weights of the model are packed."""


class PackedWeight(Packable):
    """A layer with a `weight` [out, in]: a `Matrix`."""

    weight: Any

    def matrices(self) -> Iterable[tuple[str, Matrix]]:
        return [("", self)]

    def pack(self, packing: Packing) -> None:
        pack_matrix(self, packing)

    @property
    def may_be_quantized(self) -> bool:
        return True

    def quantized_bits(self, packing: Packing) -> int | None:
        return packing.bits

    def replace(self, weight: Weight) -> None:
        del self.weight
        self.weight = weight


def pack_matrix(matrix: Matrix, packing: Packing) -> None:
    """Replaces a loaded weight by its packed form, unless it has one."""
    weight, bits = matrix.weight, matrix.quantized_bits(packing)
    if isinstance(weight, PackedQuantizedTensor):
        return
    if bits is not None:
        plain = weight.unpack() if isinstance(weight, PackedTensor) else weight
        quantized = quantize(plain, bits)
        matrix.replace(packing.pack(quantized, plain.dtype))
    elif not isinstance(weight, PackedTensor):
        matrix.replace(pack(weight, packing.exact))


class NamedMatrix(NamedTuple):
    name: str
    matrix: Matrix


def named_matrices(model: HoldsTensors) -> Iterator[NamedMatrix]:
    """Yields the matrices of a model, with the names of their layers."""
    for path, module in model.named_modules():
        if isinstance(module, Packable):
            for name, matrix in module.matrices():
                yield NamedMatrix(path + name, matrix)


class QuantizedBytes(NamedTuple):
    """The sizes of all weights that were quantized."""

    before: int
    after: int


def pack_weights(model: HoldsTensors, packing: Packing = FLOATS) -> QuantizedBytes:
    """Packs every weight of a loaded model that is not packed yet, and those that several modules
    share once. Afterwards the model cannot be loaded again."""
    before = after = 0
    by_weight: dict[int, list[NamedMatrix]] = defaultdict(list)
    for named in named_matrices(model):
        by_weight[id(named.matrix.weight)].append(named)
    for sharing in by_weight.values():
        if not isinstance(sharing[0].matrix.weight, PackedQuantizedTensor):
            quantized = pack_shared(sharing, packing)
            before, after = before + quantized.before, after + quantized.after
    for module in model.modules():
        if isinstance(module, Packable):
            module.on_packed(packing)
    return QuantizedBytes(before, after)


def pack_shared(sharing: Sequence[NamedMatrix], packing: Packing) -> QuantizedBytes:
    """Packs the weight that matrices share, unless all of their layers use it as it is."""
    before_bytes = sharing[0].matrix.weight.data.nbytes
    for name, matrix in sharing:
        try:
            matrix.pack(packing)
        except ValueError as error:
            raise ValueError(
                f"model.quantize: the matrix of {name}: {error}; copy or download the weights "
                f"again, {_OR_NOT}"
            ) from None
        if not isinstance(packed := matrix.weight, torch.Tensor):
            for _, other in sharing:
                if other.weight is not packed:
                    other.replace(packed)
            if isinstance(packed, PackedQuantizedTensor):
                return QuantizedBytes(before_bytes, packed.data.nbytes)
            break
    return QuantizedBytes(0, 0)


def late_weights(model: HoldsTensors, packing: Packing) -> list[nn.Parameter]:
    """Returns the weights of a model that get their memory when they are loaded: those of all
    layers that may be quantized, so that at most one of them is in memory as floats."""
    if not packing.is_quantized:
        return []
    late, others = {}, set()
    for module in model.modules():
        is_late = isinstance(module, PackedWeight) and module.may_be_quantized
        for name, parameter in module._parameters.items():
            if is_late and name == "weight" and parameter is not None:
                late[id(parameter)] = parameter
            else:
                others.add(id(parameter))
    return [parameter for key, parameter in late.items() if key not in others]


def refuse_unquantizable(model: HoldsTensors, packing: Packing) -> None:
    """Raises `ValueError` if a weight to be quantized does not consist of whole groups."""
    if packing.bits is None:
        return
    for path, module in model.named_modules():
        if not isinstance(module, Packable):
            continue
        for name, inputs in module.quantized_inputs(packing):
            if inputs % GROUP:
                raise ValueError(
                    f"model.quantize: the matrix of {path}{name} has {inputs} inputs in each "
                    f"worker, but {GROUP} neighbouring inputs share a scale; use another "
                    f"parallel.tensor if that makes it a multiple of {GROUP}, {_OR_NOT}"
                )
