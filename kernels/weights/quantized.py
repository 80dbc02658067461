"""Quantized weights: small numbers, and a scale for each group of an output's neighbouring inputs.

    weight[o, i] = integers[o, i] * scales[o, i / group] + mins[o, i / group]
    weight[o, i] = floats[o, i] * scales[o, i / group]

Without `mins`, the integer in the middle of the range is zero: the minimum is -scale * 2 ** (bits -
1). Floats never have minima.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional

GROUP = 32
"""The number of inputs of a group that `quantize` makes."""
GROUPS = (16, 32, 64, 128, 256)
"""The numbers of inputs of a group with which products can be computed."""
SCALE_TYPES = (torch.float16, torch.float32)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of a float of 4 bits without its sign, which is the highest bit."""
_ROWS_BYTES = 4 * 2**20
"""The memory, in bytes, that the conversion of some rows of a weight may use: on CPUs it stays in
the cache."""
_DEVICE_ROWS_BYTES = 256 * 2**20
"""The same on other devices, which need many rows to be busy."""


class Numbers(Enum):
    """The small numbers of a quantized weight."""

    INTEGERS = "int"
    E2M1 = "e2m1"
    """Floats of 4 bits: a sign, 2 bits of the exponent, and one of the mantissa."""
    E4M3 = "e4m3"
    """Floats of 8 bits: a sign, 4 bits of the exponent, and 3 of the mantissa; without NaN."""

    @property
    def float_bits(self) -> int | None:
        """The bits of a float; None for integers."""
        return {Numbers.E2M1: 4, Numbers.E4M3: 8}.get(self)

    def float_values(self, device: torch.device) -> Tensor:
        """Returns the float that each integer of `float_bits` bits represents, float32."""
        if self is Numbers.E2M1:
            return torch.tensor([*E2M1, *(-value for value in E2M1)], device=device)
        codes = torch.arange(256, dtype=torch.uint8, device=device)
        return codes.view(torch.float8_e4m3fn).float()


INTEGERS = frozenset({Numbers.INTEGERS})


@dataclass(frozen=True)
class QuantizedForm:
    """The form of a quantized weight."""

    bits: int
    """Bits of a number: 4 or 8."""
    group: int
    """The number of inputs with one scale: one of `GROUPS`."""
    has_mins: bool
    scale_type: torch.dtype
    numbers: Numbers = Numbers.INTEGERS

    def __post_init__(self) -> None:
        assert self.bits in (4, 8) and self.group in GROUPS and self.scale_type in SCALE_TYPES, self
        floats = self.numbers.float_bits
        assert floats is None or (floats == self.bits and not self.has_mins), self

    def __str__(self) -> str:
        minima = ", with minima" if self.has_mins else ""
        scales = str(self.scale_type).removeprefix("torch.")
        is_int = self.numbers is Numbers.INTEGERS
        name = f"int{self.bits}" if is_int else f"floats {self.numbers.name}"
        return f"{name} in groups of {self.group} ({scales} scales{minima})"

    @property
    def zero(self) -> int:
        """The integer that represents zero in a form without minima."""
        return 1 << (self.bits - 1)

    def block_bytes(self, panel: int) -> int:
        """Returns the bytes of one group of `panel` outputs."""
        numbers = self.scale_type.itemsize * (1 + self.has_mins)
        return panel * (numbers + self.group * self.bits // 8)


@dataclass(frozen=True)
class QuantizedTensor:
    """A weight [out, in] that is not packed yet."""

    integers: Tensor
    """[out, in] uint8, each below 2 ** bits; the bits of a float are an integer, too"""
    scales: Tensor
    """[out, in / group] float16 or float32, finite"""
    mins: Tensor | None
    """The same shape and type as `scales`; None: see the module's docstring."""
    bits: int
    numbers: Numbers = Numbers.INTEGERS

    @property
    def form(self) -> QuantizedForm:
        group = self.integers.shape[1] // self.scales.shape[1]
        has_mins = self.mins is not None
        return QuantizedForm(self.bits, group, has_mins, self.scales.dtype, self.numbers)

    def rows(self, start: int, count: int) -> QuantizedTensor:
        """Returns some neighbouring outputs, as views."""
        part = slice(start, start + count)
        mins = None if self.mins is None else self.mins[part]
        return replace(self, integers=self.integers[part], scales=self.scales[part], mins=mins)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight [out, in]: each number is rounded to float32, then to `dtype`."""
        outs, size = self.integers.shape
        result = self.integers.new_empty(outs, size, dtype=dtype)
        step = max(1, _rows_bytes(self.integers) // (16 * max(1, size)))
        for row in range(0, outs, step):
            rows = slice(row, row + step)
            scales = self.scales[rows].double().unsqueeze(2)
            groups = self.integers[rows].unflatten(1, (-1, self.form.group))
            if self.numbers is not Numbers.INTEGERS:
                values = self.numbers.float_values(groups.device)[groups.long()] * scales
            elif self.mins is None:
                values = groups * scales - self.form.zero * scales
            else:
                values = groups * scales + self.mins[rows].unsqueeze(2)
            result[rows] = values.float().flatten(1)
        return result


@dataclass(frozen=True)
class PackedQuantizedTensor:
    """A quantized weight [out, in] in panels of neighbouring outputs, for products with `dtype`.

    A panel has one block for each group: the scales of its outputs, their minima if there are any,
    and words of 32 bits for neighbouring inputs of one output, [words, outputs of a panel]. A word
    has 4 inputs of 8 bits, the first in the lowest byte; or 8 inputs of 4 bits, the first four in
    the low halves of the bytes. Outputs that pad the last panel are zero.
    """

    data: Tensor
    """[panels, in / group, bytes of a block] uint8"""
    out_features: int
    in_features: int
    form: QuantizedForm
    dtype: torch.dtype
    """The type of the inputs and outputs of products."""
    rounded_activations: bool
    """Whether products round the groups of their inputs to integers of 8 bits and a scale, too."""

    @property
    def device(self) -> torch.device:
        return self.data.device

    @classmethod
    def pack(
        cls, weight: QuantizedTensor, panel: int, dtype: torch.dtype, rounded_activations: bool
    ) -> PackedQuantizedTensor:
        """Returns the weight in panels of this many outputs."""
        (outs, size), form = weight.integers.shape, weight.form
        groups = size // form.group
        data = weight.integers.new_empty(-(-outs // panel), groups, form.block_bytes(panel))
        step = max(1, _rows_bytes(weight.integers) // (8 * panel * size)) * panel
        for row in range(0, outs, step):
            data[row // panel : (row + step) // panel] = _blocks(weight.rows(row, step), panel)
        return cls(data, outs, size, form, dtype, rounded_activations)

    def unpack(self) -> QuantizedTensor:
        """Returns the weight as it was packed."""
        form, outs = self.form, self.out_features
        panel = self.data.shape[2] // form.block_bytes(1)
        numbers = panel * form.scale_type.itemsize
        sizes = [numbers] * (1 + form.has_mins)
        *scales, words = self.data.split([*sizes, self.data.shape[2] - sum(sizes)], 2)
        words = _cast(words, torch.int32).unflatten(2, (-1, panel))
        words = words.permute(0, 3, 1, 2).flatten(0, 1)[:outs].flatten(1)
        integers = _cast(words, torch.uint8)
        if form.bits == 4:
            halves = integers.unflatten(1, (-1, 4))
            integers = torch.stack((halves & 15, halves >> 4), 2).flatten(1)
        unpacked = [
            _cast(part, form.scale_type).transpose(1, 2).flatten(0, 1)[:outs].contiguous()
            for part in scales
        ]
        mins = unpacked[1] if form.has_mins else None
        return QuantizedTensor(integers, unpacked[0], mins, form.bits, form.numbers)


def _blocks(weight: QuantizedTensor, panel: int) -> Tensor:
    """Returns a weight as the data of a `PackedQuantizedTensor`."""
    form, (outs, size) = weight.form, weight.integers.shape
    padding = (0, 0, 0, -outs % panel)
    bytes_ = weight.integers
    if form.bits == 4:
        low, high = bytes_.unflatten(1, (-1, 2, 4)).unbind(2)
        bytes_ = (low | high << 4).flatten(1)
    words = _cast(functional.pad(bytes_, padding), torch.int32)
    # [panels, panel, groups, words] -> [panels, groups, words, panel]
    words = words.unflatten(1, (size // form.group, -1)).unflatten(0, (-1, panel))
    parts = [_cast(words.permute(0, 2, 3, 1).flatten(2), torch.uint8)]
    for numbers in (weight.mins, weight.scales):
        if numbers is not None:
            numbers = functional.pad(numbers, padding).unflatten(0, (-1, panel))
            parts.insert(0, _cast(numbers.transpose(1, 2), torch.uint8))
    return torch.cat(parts, 2)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the bytes of a tensor as numbers of another type, which divide its last dimension."""
    # In one dimension, because torch accepts only strides of contiguous tensors, even of size 1.
    flat = tensor.reshape(-1).contiguous()
    if flat.storage_offset() * flat.itemsize % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).view(*tensor.shape[:-1], -1)


def _rows_bytes(weight: Tensor) -> int:
    return _ROWS_BYTES if weight.device.type == "cpu" else _DEVICE_ROWS_BYTES


def quantize(weight: Tensor, bits: int) -> QuantizedTensor:
    """Rounds a weight [out, in] of floats to integers, without minima; `in` must be a multiple of
    `GROUP`.

    With 8 bits the scale of a group is its largest magnitude / 127. With 4 bits it is the one of
    several whose squared error is the smallest.
    """
    with _one_thread():
        return _quantized(weight.detach(), bits)


@contextmanager
def _one_thread() -> Iterator[None]:
    """In this context torch computes with one thread: operations that stay in the cache are so
    short that other threads, especially of a busy processor, would delay them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _quantized(weight: Tensor, bits: int) -> QuantizedTensor:
    outs, size = weight.shape
    assert size % GROUP == 0, (size, GROUP)
    step = max(1, _rows_bytes(weight) // (32 * max(1, size)))
    rows = [weight[row : row + step] for row in range(0, outs, step)]
    zero = 1 << (bits - 1)
    scale_type = _scale_type(rows, zero)
    integers = torch.empty(outs, size, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(outs, size // GROUP, dtype=scale_type, device=weight.device)
    for at, part in enumerate(rows):
        here = slice(at * step, at * step + len(part))
        groups = part.float().unflatten(1, (-1, GROUP))
        largest_of = groups.abs().amax(-1, keepdim=True)
        of_rows = (largest_of / 127 if bits == 8 else _best_scales(groups)).to(scale_type)
        scales[here] = of_rows.squeeze(2)
        rounded = _integers(groups, of_rows.float(), -127 if bits == 8 else -8, zero - 1)
        integers[here] = (rounded + zero).flatten(1)
    return QuantizedTensor(integers, scales, None, bits)


def _scale_type(rows: list[Tensor], zero: int) -> torch.dtype:
    """Returns float16 if it represents the scales of all groups. It has steps of 2^-24 below 2^-14,
    and ends at 65504. Raises `ValueError` for a weight that is not finite."""
    is_half = True
    for part in rows:
        largest = part.unflatten(1, (-1, GROUP)).abs().amax(-1).float()
        if not bool(largest.isfinite().all()):
            raise ValueError("a weight is infinite or not a number, so it has no scale")
        scales = largest[largest > 0] / zero
        is_half &= bool(((scales > 2**-14) & (scales < 2**14)).all())
    return torch.float16 if is_half else torch.float32


def _integers(groups: Tensor, scales: Tensor, lowest: int, highest: int) -> Tensor:
    scales = torch.where(
        scales == 0, 1.0, scales
    )  # all numbers of such a group are zero, or nearly
    return (groups / scales).round_().clamp_(lowest, highest)


_RANGES = (7.0, 7.5, 8.0, 8.5)
"""The integers, not rounded, to which the largest number of a group may be scaled. Integers end at
-8 on one side and at 7 on the other, and the largest number is on the side of -8. It is rounded up
or cut off if that makes the other numbers more precise."""


def _best_scales(groups: Tensor) -> Tensor:
    """[..., GROUP] -> the scale of each group for integers of 4 bits, [..., 1]"""
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    largest = torch.where(high > -low, high, low)
    best, lowest_error = largest, torch.full_like(largest, torch.inf)
    for numbers in _RANGES:
        scales = largest / -numbers
        integers = _integers(groups, scales, -8, 7)
        error = integers.mul_(scales).sub_(groups).square_().sum(-1, keepdim=True)
        best = torch.where(error < lowest_error, scales, best)
        lowest_error = torch.minimum(error, lowest_error)
    integers = _integers(groups, best, -8, 7)
    # The scale with the least squared error for these integers.
    squares = integers.square().sum(-1, keepdim=True)
    return torch.where(squares == 0, 0.0, (groups * integers).sum(-1, keepdim=True) / squares)
