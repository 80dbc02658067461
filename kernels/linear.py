"""Products with a constant weight, y = x W^T + b, and lookups of its rows.

A backend may store a weight in its own order: `pack` it once, after it is loaded.

Results are *exact* if the bits of a row depend neither on the other rows nor on its place among
them (also called batch-invariant). Products with packed weights are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swell.kernels import backends
from swell.kernels.weights.quantized import Numbers, PackedQuantizedTensor, QuantizedTensor

LAYOUT_VERSION = 2
"""The version of the order of packed weights, which files store, too: another order gets another
number."""


@dataclass(frozen=True)
class PackedTensor:
    """A weight [out, in] in panels of neighbouring outputs; the last panel is padded with zeros."""

    data: Tensor
    """[panels, in, outputs of a panel]; or neighbouring inputs in pairs, the last one padded with
    zero: [panels, in / 2, outputs of a panel, 2]"""
    out_features: int
    in_features: int

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    @staticmethod
    def shape(outs: int, size: int, panel: int, dtype: torch.dtype) -> tuple[int, ...]:
        """Returns the shape of `data` for a weight [outs, size] of the backend `cpu`, with `panel`
        outputs per panel."""
        panels = -(-outs // panel)
        return (
            (panels, -(-size // 2), panel, 2) if dtype == torch.bfloat16 else (panels, size, panel)
        )

    def unpack(self) -> Tensor:
        """Returns the weight [out, in], from panels of any number of outputs."""
        return (
            self.data.transpose(1, 2)
            .flatten(0, 1)
            .flatten(1)[: self.out_features, : self.in_features]
        )


FloatWeight = Tensor | PackedTensor
Weight = FloatWeight | PackedQuantizedTensor


def pack(weight: Tensor, exact: bool = False) -> FloatWeight:
    """Returns `weight` [out, in] in the form that is fastest for `linear`: itself, or packed, as a
    copy or in the same memory. With `exact`, packed if the backend can pack weights.

    Backends: reference (never packs), cpu (packs float32 and bfloat16 in any case), triton (packs
    only with `exact`).
    """
    packed: FloatWeight = backends.get("linear", weight.device.type).pack(weight, exact)
    return packed


def pack_quantized(
    weight: QuantizedTensor, dtype: torch.dtype, rounded_activations: bool = False
) -> PackedQuantizedTensor:
    """Returns `weight` [out, in] in the form for products of `dtype`: float32, bfloat16 or
    float16.

    Products use the dequantized weight, rounded to `dtype`; in `cpu` they have the bits of products
    with it, packed. With `rounded_activations` a backend may round the inputs, for speed:

    - `cpu` rounds each group of a row to integers of 8 bits and a scale, the group's largest
      magnitude / 127. So input i differs by at most half the scale s(i) of its group, and output o
      by at most the sum over i of |weight[o, i]| * s(i) / 2, besides the rounding of float32.
    - `triton` rounds a row of bfloat16 to E4M3 and a scale, its largest magnitude / 448, if the
      weight has E4M3 numbers with one scale for each output. So input i differs by at most the
      larger of |x[i]| / 16 and scale / 1024. Such products are not exact.

    An input that is NaN or infinite then makes all outputs of its row NaN. The weight has numbers
    that `numbers` returns.

    Backends: reference (does not round inputs), cpu, triton.
    """
    backend = backends.get("linear", weight.scales.device.type)
    packed: PackedQuantizedTensor = backend.pack_quantized(weight, dtype, rounded_activations)
    return packed


def numbers(device_type: str) -> frozenset[Numbers]:
    """Returns the numbers of quantized weights with which products on this type of device compute.

    Backends: reference and triton (all), cpu (integers).
    """
    found: frozenset[Numbers] = backends.get("linear", device_type).numbers()
    return found


def panel(device_type: str) -> int | None:
    """Returns the number of outputs per panel on this type of device; None: weights keep the order
    of a checkpoint.

    Backends: reference, cpu, triton.
    """
    width: int | None = backends.get("linear", device_type).panel()
    return width


def numerics(device_type: str) -> str | None:
    """Returns the numerics class of this backend on this type of device: libraries with the same
    name find the same bits for all operations. None: torch computes, and no name is known.

    In `cpu` it has the processor's architecture, whether a product and a sum are rounded once
    (`fma`), and the compiler with its version; it does not depend on the width of vectors, nor on
    the instructions for bfloat16 and integers. Backends: reference and triton (None), cpu.
    """
    name: str | None = backends.get("linear", device_type).numerics()
    return name


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x [..., in], weight [out, in], bias [out] or none -> new [..., out], all of one type.

    With a packed weight a row's result has the same bits in every batch. Sums are in float32, and
    rounded once to the type. Backends: reference, cpu, triton.
    """
    return backends.get("linear", x.device.type).linear(x, weight, bias)


def linear_argmax(x: Tensor, weight: Weight, outs: int) -> tuple[Tensor, Tensor]:
    """x [S, in], weight [out, in] -> the largest of the first `outs` > 0 outputs of `linear`, [S]
    float32, and its index, [S] int64. The first of equal outputs is selected. If one of a row's
    outputs is NaN, so is the largest, and the index is undefined.

    Backends: reference, cpu, triton.
    """
    return backends.get("linear", x.device.type).linear_argmax(x, weight, outs)


def embedding(ids: Tensor, weight: Weight) -> Tensor:
    """Rows `ids` [T] int of weight [N, hidden] -> new [T, hidden]. On a CPU, raises `IndexError`
    for an id outside the weight, also at the end of a replay.

    Backends: reference, cpu, triton.
    """
    return backends.get("linear", ids.device.type).embedding(ids, weight)


def embedding_part(ids: Tensor, weight: Weight, start: int) -> Tensor:
    """Looks up ids [T] int64 in a matrix whose rows from `start` on are weight [N, hidden] -> new
    [T, hidden]; ids of other rows give zeros.

    Backends: reference, cpu, triton.
    """
    return backends.get("linear", ids.device.type).embedding_part(ids, weight, start)


def pick_largest(values: Tensor, indices: Tensor, part: int) -> tuple[Tensor, Tensor]:
    """Merges results of `linear_argmax` for parts of a weight, of `part` outputs each: values
    [S, parts] float32, indices [S, parts] int64 within the parts -> the largest values, [S], and
    their indices in the whole, [S]. The first of equal values is selected, and NaN is the largest.

    Backends: reference, cpu, triton.
    """
    return backends.get("linear", values.device.type).pick_largest(values, indices, part)
