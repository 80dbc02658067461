"""The quantized blocks of GGUF tensors: integers in groups, each with a scale and a minimum.

    number = scale * integer - minimum         in float32, rounded after each operation

The layouts are those of ggml. `blocks` below is [n, bytes of a block], uint8; a scale in float16 is
widened before it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from swell.configs.files.gguf.block_types import BlockType
from swell.kernels.weights.quantized import QuantizedTensor


class Groups(NamedTuple):
    """The integers of blocks, in groups that share a scale."""

    integers: torch.Tensor
    """[n, groups, numbers of a group], int8"""
    scales: torch.Tensor
    """[n, groups], float32"""
    mins: torch.Tensor | None
    """[n, groups], float32; None: all are 0"""


def keep(blocks: torch.Tensor, kind: BlockType) -> QuantizedTensor:
    """Returns the numbers of blocks of a type in `KEPT`, as [n, numbers of a block]."""
    bits, zero, _ = KEPT[kind.name]
    integers, scales, mins = GROUPS[kind.name](blocks)
    unsigned = integers.view(torch.uint8) + zero
    return QuantizedTensor(unsigned.flatten(1), scales, None if mins is None else -mins, bits)


def dequantize(blocks: torch.Tensor, kind: BlockType) -> torch.Tensor:
    """Returns the numbers of blocks, [n, numbers of a block], float32."""
    if kind.name in FLOATS:
        return blocks.view(FLOATS[kind.name]).float()
    integers, scales, mins = GROUPS[kind.name](blocks)
    numbers = integers.float().mul_(scales[..., None])
    if mins is not None:
        numbers.sub_(mins[..., None])
    return numbers.flatten(1)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Returns the float16 at a byte of each block as [n, 1], float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[n, groups, bytes] -> [n, groups, 2 * bytes]: the low halves of a group's bytes, then the
    high ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _fifth_bits(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Returns 32 bits at a byte of each block, as 0 or 16: [n, 1, 32]."""
    bits = torch.arange(8, dtype=torch.uint8)
    return (((blocks[:, at : at + 4, None] >> bits) & 1) << 4).flatten(1).unsqueeze(1)


def _q4_0(blocks: torch.Tensor) -> Groups:
    return Groups(_nibbles(blocks[:, None, 2:]).char() - 8, _half(blocks, 0), None)


def _q4_1(blocks: torch.Tensor) -> Groups:
    return Groups(_nibbles(blocks[:, None, 4:]).char(), _half(blocks, 0), -_half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> Groups:
    integers = _nibbles(blocks[:, None, 6:]) | _fifth_bits(blocks, 2)
    return Groups(integers.char() - 16, _half(blocks, 0), None)


def _q5_1(blocks: torch.Tensor) -> Groups:
    integers = _nibbles(blocks[:, None, 8:]) | _fifth_bits(blocks, 4)
    return Groups(integers.char(), _half(blocks, 0), -_half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> Groups:
    return Groups(blocks[:, None, 2:].view(torch.int8), _half(blocks, 0), None)


def _quarters(packed: torch.Tensor) -> torch.Tensor:
    """[n, 64] -> [n, 2, 4, 32]: two bits of each byte, for each half of a block from the low bits
    to the high ones."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    return (packed.view(-1, 2, 1, 32) >> shifts[:, None]) & 3


def _q2_k(blocks: torch.Tensor) -> Groups:
    scales = blocks[:, :16]
    integers = _quarters(blocks[:, 16:80].contiguous()).view(-1, 16, 16)
    return Groups(
        integers.char(),
        _half(blocks, 80) * (scales & 15).float(),
        _half(blocks, 82) * (scales >> 4).float(),
    )


def _q3_k(blocks: torch.Tensor) -> Groups:
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    upper = (((high[:, None] >> shifts[:, None]) & 3) << 4).flatten(1)
    scales = (torch.cat((low & 15, low >> 4), -1) | upper).char() - 32
    planes = torch.arange(8, dtype=torch.uint8)
    third = ((blocks[:, None, :32] >> planes[:, None]) & 1).view(-1, 2, 4, 32) << 2
    integers = (_quarters(blocks[:, 32:96].contiguous()) | third).char() - 4
    return Groups(integers.view(-1, 16, 16), _half(blocks, 108) * scales.float(), None)


def _k_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, 12] -> the 8 scales and the 8 minimums of 6 bits, each [n, 8], float32."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), -1)
    mins = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), -1)
    return scales.float(), mins.float()


def _q4_k(blocks: torch.Tensor) -> Groups:
    scales, mins = _k_scales(blocks[:, 4:16])
    integers = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 8, 32)
    return Groups(integers.char(), _half(blocks, 0) * scales, _half(blocks, 2) * mins)


def _q5_k(blocks: torch.Tensor) -> Groups:
    scales, mins = _k_scales(blocks[:, 4:16])
    planes = torch.arange(8, dtype=torch.uint8)
    fifth = ((blocks[:, None, 16:48] >> planes[:, None]) & 1) << 4
    integers = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32) | fifth
    return Groups(integers.char(), _half(blocks, 0) * scales, _half(blocks, 2) * mins)


def _q6_k(blocks: torch.Tensor) -> Groups:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    upper = _quarters(blocks[:, 128:192].contiguous()) << 4
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    integers = (low | upper).char() - 32
    return Groups(integers.view(-1, 16, 16), _half(blocks, 208) * scales.float(), None)


FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Name of a type that is not quantized -> the same type of torch."""

KEPT = {
    # name -> the bits of its integers in products, the integer that stands for 0 in them, and the
    # numbers of a group
    "Q4_0": (4, 8, 32),
    "Q4_1": (4, 0, 32),
    "Q4_K": (4, 0, 32),
    "Q5_0": (8, 128, 32),
    "Q5_1": (8, 0, 32),
    "Q5_K": (8, 0, 32),
    "Q6_K": (8, 128, 16),
    "Q8_0": (8, 128, 32),
}
"""Types whose integers products can use."""

GROUPS: dict[str, Callable[[torch.Tensor], Groups]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""Name of a quantized type -> the function that unpacks its blocks."""
