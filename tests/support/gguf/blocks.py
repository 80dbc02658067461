"""Quantizes numbers into the blocks of GGUF files, from ggml's description of their layouts: where
each bit of each integer is.

Every function returns the bytes, and the numbers that a reader must find in them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Array = np.ndarray


class Bits(NamedTuple):
    """A part of an integer: `count` of its bits from `first` are in a byte from the bit `shift`."""

    byte: int
    shift: int
    first: int
    count: int


def encode(kind: str, numbers: Array) -> tuple[Array, Array]:
    """[rows, columns] float32 -> the bytes of each row [rows, bytes], and the numbers in them."""
    rows = len(numbers)
    if kind == "F32":
        return numbers.astype("<f4").view(np.uint8), numbers
    if kind == "F16":
        half = numbers.astype("<f2")
        return half.view(np.uint8), half.astype(np.float32)
    if kind == "BF16":
        bits = numbers.astype("<f4").view(np.uint32) & 0xFFFF0000  # cut, not rounded
        upper = (bits >> 16).astype("<u2")
        return upper.view(np.uint8), bits.view(np.float32)
    size, make = MAKERS[kind]
    blocks, values = make(numbers.reshape(-1, size).astype(np.float32))
    return blocks.reshape(rows, -1), values.reshape(rows, -1).astype(np.float32)


def _put(blocks: Array, integers: Array, places: Callable[[int], list[Bits]]) -> None:
    for element in range(integers.shape[1]):
        for byte, shift, first, count in places(element):
            bits = (integers[:, element].astype(np.int64) >> first) & (2**count - 1)
            blocks[:, byte] |= (bits << shift).astype(np.uint8)


def _half(blocks: Array, at: int, numbers: Array) -> Array:
    """Writes [n] numbers as float16; returns them as they are stored."""
    half = numbers.astype("<f2")
    blocks[:, at : at + 2] = half[:, None].view(np.uint8)
    return half.astype(np.float32)


def _rounded(numbers: Array, scales: Array, low: int, high: int) -> Array:
    safe = np.where(scales == 0, 1, scales)
    return np.clip(np.rint(numbers / safe), low, high).astype(np.float32)


def _symmetric(nbytes: int, offset: int, places: Callable[[int], list[Bits]]) -> Maker:
    def make(numbers: Array) -> tuple[Array, Array]:
        blocks = np.zeros((len(numbers), nbytes), np.uint8)
        scale = _half(blocks, 0, np.abs(numbers).max(1) / (offset - 1))[:, None]
        integers = _rounded(numbers, scale, -offset, offset - 1)
        stored = integers if offset == 128 else integers + offset
        _put(blocks, stored, places)
        return blocks, scale * integers

    return make


def _affine(nbytes: int, most: int, places: Callable[[int], list[Bits]]) -> Maker:
    def make(numbers: Array) -> tuple[Array, Array]:
        blocks = np.zeros((len(numbers), nbytes), np.uint8)
        low = numbers.min(1)
        scale = _half(blocks, 0, (numbers.max(1) - low) / most)[:, None]
        low = _half(blocks, 2, low)[:, None]
        integers = _rounded(numbers - low, scale, 0, most)
        _put(blocks, integers, places)
        return blocks, scale * integers + low

    return make


class KLayout(NamedTuple):
    """The layout of a block of 256 numbers whose groups have integer scales."""

    nbytes: int
    group: int
    """The numbers of a group."""
    low: int
    high: int
    """The least and the greatest integer; it is stored minus `low`."""
    most: int
    """The greatest scale, and the greatest minimum."""
    scale_offset: int
    """Added to a scale before it is stored."""
    at: tuple[int, ...]
    """The byte of the float16 scale of scales, and of that of minimums if there are any."""
    integers: Callable[[int], list[Bits]]
    scales: Callable[[int], list[Bits]]
    mins: Callable[[int], list[Bits]] | None = None

    def make(self, numbers: Array) -> tuple[Array, Array]:
        blocks = np.zeros((len(numbers), self.nbytes), np.uint8)
        groups = numbers.reshape(len(numbers), -1, self.group)
        if self.mins is None:
            mins = np.zeros(groups.shape[:2], np.float32)
            scales = np.abs(groups).max(2) / self.high
        else:
            lows = np.minimum(groups.min(2), 0)
            unit = _half(blocks, self.at[1], -lows.min(1) / self.most)[:, None]
            integers = _rounded(-lows, unit, 0, self.most)
            _put(blocks, integers, self.mins)
            mins = unit * integers
            scales = (groups.max(2) - lows) / self.high
        unit = _half(blocks, self.at[0], scales.max(1) / self.most)[:, None]
        integers = _rounded(scales, unit, 0, self.most)
        _put(blocks, integers + self.scale_offset, self.scales)
        scales = unit * integers
        found = _rounded(groups + mins[..., None], scales[..., None], self.low, self.high)
        _put(blocks, (found - self.low).reshape(len(numbers), -1), self.integers)
        return blocks, scales[..., None] * found - mins[..., None]


Maker = Callable[[Array], tuple[Array, Array]]


def _k_scale(k: int) -> list[Bits]:
    return [Bits(4 + k, 0, 0, 6)] if k < 4 else [Bits(8 + k, 0, 0, 4), Bits(k, 6, 4, 2)]


def _k_min(k: int) -> list[Bits]:
    return [Bits(8 + k, 0, 0, 6)] if k < 4 else [Bits(8 + k, 4, 0, 4), Bits(4 + k, 6, 4, 2)]


def _quarter(at: int, e: int) -> Bits:
    return Bits(at + 32 * (e // 128) + e % 32, 2 * (e % 128 // 32), 0, 2)


def _pairs(at: int, e: int) -> Bits:
    return Bits(at + 32 * (e // 64) + e % 32, 4 * (e % 64 // 32), 0, 4)


def _six(e: int) -> list[Bits]:
    half, quarter, place = e // 128, e % 128 // 32, e % 32
    low = Bits(64 * half + 32 * (quarter % 2) + place, 4 * (quarter // 2), 0, 4)
    return [low, Bits(128 + 32 * half + place, 2 * quarter, 4, 2)]


K_LAYOUTS = {
    "Q2_K": KLayout(
        84,
        16,
        0,
        3,
        15,
        0,
        (80, 82),
        lambda e: [_quarter(16, e)],
        lambda k: [Bits(k, 0, 0, 4)],
        lambda k: [Bits(k, 4, 0, 4)],
    ),
    "Q3_K": KLayout(
        110,
        16,
        -4,
        3,
        31,
        32,
        (108,),
        lambda e: [_quarter(32, e), Bits(e % 32, e // 32, 2, 1)],
        lambda k: [Bits(96 + k % 8, 4 * (k // 8), 0, 4), Bits(104 + k % 4, 2 * (k // 4), 4, 2)],
    ),
    "Q4_K": KLayout(144, 32, 0, 15, 63, 0, (0, 2), lambda e: [_pairs(16, e)], _k_scale, _k_min),
    "Q5_K": KLayout(
        176,
        32,
        0,
        31,
        63,
        0,
        (0, 2),
        lambda e: [_pairs(48, e), Bits(16 + e % 32, e // 32, 4, 1)],
        _k_scale,
        _k_min,
    ),
    "Q6_K": KLayout(210, 16, -32, 31, 127, 0, (208,), _six, lambda k: [Bits(192 + k, 0, 0, 8)]),
}

MAKERS: dict[str, tuple[int, Maker]] = {
    "Q4_0": (32, _symmetric(18, 8, lambda e: [Bits(2 + e % 16, 4 * (e // 16), 0, 4)])),
    "Q4_1": (32, _affine(20, 15, lambda e: [Bits(4 + e % 16, 4 * (e // 16), 0, 4)])),
    "Q5_0": (
        32,
        _symmetric(
            22,
            16,
            lambda e: [Bits(6 + e % 16, 4 * (e // 16), 0, 4), Bits(2 + e // 8, e % 8, 4, 1)],
        ),
    ),
    "Q5_1": (
        32,
        _affine(
            24,
            31,
            lambda e: [Bits(8 + e % 16, 4 * (e // 16), 0, 4), Bits(4 + e // 8, e % 8, 4, 1)],
        ),
    ),
    "Q8_0": (32, _symmetric(34, 128, lambda e: [Bits(2 + e, 0, 0, 8)])),
    **{name: (256, layout.make) for name, layout in K_LAYOUTS.items()},
}
"""Name of a type -> the numbers of a block, and what makes blocks."""
