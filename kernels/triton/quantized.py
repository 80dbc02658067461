"""Products with quantized weights, and lookups of their rows.

A weight is packed in panels of 32 outputs (see `swell.kernels.weights.quantized`): a program reads
one stretch of memory from its beginning to its end, and neighbouring threads read neighbouring
outputs, 16 bytes each. The parts of a block begin at multiples of 64 bytes, for every form:

    panel [group] [group] [group] ..        group: scales [32] | mins [32], if any | words [.., 32]

A program dequantizes BLOCK_K inputs of its outputs, rounds them to the type of x, and multiplies
them as `linear.py` multiplies plain weights: sizes depend on the weight only, and the terms of a
sum are added in the order of the inputs. So the bits of a row depend neither on the other rows nor
on its place among them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from swell.kernels.triton import Tile
from swell.kernels.weights.quantized import Numbers, PackedQuantizedTensor

PANEL = 32
MANY_OUTPUTS = 8192
"""The number of outputs from which a program computes two panels: fewer programs would not keep
enough reads in flight for the memory of a GPU."""
ROW_INPUTS = 1024
"""The most inputs of a row that a program looks up."""


@triton.jit
def dequantized(
    data, column, first, IN: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    HAS_MINS: tl.constexpr, SCALES: tl.constexpr, EXPONENT: tl.constexpr, PANEL: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Returns weights [BLOCK_K, columns] float32: BLOCK_K inputs from `first` on, a multiple of
    BLOCK_K, of the outputs `column`, which the panels contain. Inputs from IN on are zero.
    EXPONENT: the bits of the exponent of a float; 0: numbers are integers."""
    # Sizes of a block of the panel, in words of 32 bits.
    SCALE_BYTES: tl.constexpr = SCALES.primitive_bitwidth // 8
    HEAD: tl.constexpr = PANEL * SCALE_BYTES // 4 * (1 + HAS_MINS)
    WORDS: tl.constexpr = HEAD + PANEL * GROUP * BITS // 32
    # The tile has PARTS groups, or a part of one group; SPAN inputs of each.
    SPAN: tl.constexpr = GROUP if GROUP < BLOCK_K else BLOCK_K
    PARTS: tl.constexpr = BLOCK_K // SPAN
    PER_WORD: tl.constexpr = 32 // BITS
    COLUMNS: tl.constexpr = column.shape[0]
    # The integer 2 ** 23 + i has the bits of the float 2 ** 23 with i in the lowest ones.
    SHIFTED: tl.constexpr = 8388608.0
    ZERO: tl.constexpr = SHIFTED + 2 ** (BITS - 1)
    # A small float with the exponent e has the bits of a float32 with the exponent e, whose bias is
    # larger, if its mantissa is at the top: also below the least normal number.
    TOP: tl.constexpr = 23 - (BITS - 1 - EXPONENT)
    BIAS: tl.constexpr = 2.0 ** (128 - 2 ** (EXPONENT - 1)) if EXPONENT else 1.0

    k = first + tl.arange(0, PARTS) * SPAN
    group, inside = k // GROUP, k < IN
    panel = (column // PANEL).to(tl.int64) * (IN // GROUP) * WORDS
    block = panel[None, :] + (group * WORDS)[:, None]
    at = data + block[:, None, :] + (column % PANEL)[None, None, :] + HEAD
    word = (k % GROUP // PER_WORD)[:, None] + tl.arange(0, SPAN // PER_WORD)[None, :]
    words = tl.load(at + word[:, :, None] * PANEL, mask=inside[:, None, None], other=0)
    j = tl.arange(0, PER_WORD)
    shift = 8 * j if BITS == 8 else 8 * (j % 4) + 4 * (j // 4)
    integers = (words[:, :, None, :] >> shift[None, None, :, None]) & (2**BITS - 1)
    if EXPONENT:
        sign = (integers >> (BITS - 1)) << 31
        bits = sign | ((integers & (2 ** (BITS - 1) - 1)) << TOP)
    else:
        bits = integers | 0x4B000000
    found = tl.reshape(bits.to(tl.float32, bitcast=True), [PARTS, SPAN, COLUMNS])

    numbers = (data + block).to(tl.pointer_type(SCALES)) + (column % PANEL)[None, :]
    scale = tl.load(numbers, mask=inside[:, None], other=0.0).to(tl.float32)[:, None, :]
    if EXPONENT:
        weights = (found * BIAS) * scale
    elif HAS_MINS:
        low = tl.load(numbers + PANEL, mask=inside[:, None], other=0.0).to(tl.float32)
        weights = tl.fma(found - SHIFTED, scale, low[:, None, :])
    else:
        weights = (found - ZERO) * scale
    return tl.reshape(weights, [BLOCK_K, COLUMNS])


@triton.jit(do_not_specialize=["count"])
def _quantized_linear(
    x, data, bias, y, count, IN: tl.constexpr, OUT: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr, HAS_MINS: tl.constexpr, SCALES: tl.constexpr, EXPONENT: tl.constexpr,
    PANEL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x [count, IN], data: see `PackedQuantizedTensor`, bias [OUT] or None, y [count, OUT]; all are
    contiguous."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, inside = row < count, column < OUT
    rows = x + row.to(tl.int64)[:, None] * IN
    # The outputs of panels after the last one are those of the first one, and are not stored.
    of_panels = tl.where(column < tl.cdiv(OUT, PANEL) * PANEL, column, column % PANEL)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, IN, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)[None, :]
        a = tl.load(rows + k, mask=is_row[:, None] & (k < IN), other=0.0)
        b = dequantized(
            data, of_panels, first, IN, GROUP, BITS, HAS_MINS, SCALES, EXPONENT, PANEL, BLOCK_K
        )
        total = tl.dot(a, b.to(x.dtype.element_ty), total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    to = y + row.to(tl.int64)[:, None] * OUT + column[None, :]
    tl.store(to, total, mask=is_row[:, None] & inside[None, :])


@triton.jit
def _quantized_embedding(
    ids, data, y, start, IN: tl.constexpr, OUT: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr, HAS_MINS: tl.constexpr, SCALES: tl.constexpr, EXPONENT: tl.constexpr,
    PANEL: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Looks up ids [T] in rows `start` to start + OUT of a matrix -> y [T, IN]; ids of other rows
    give zeros."""
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_K
    row = tl.load(ids + token).to(tl.int64) - start
    is_here = (row >= 0) & (row < OUT)
    column = tl.where(is_here, row, 0) + tl.zeros([1], tl.int64)
    weights = dequantized(
        data, column, first, IN, GROUP, BITS, HAS_MINS, SCALES, EXPONENT, PANEL, BLOCK_K
    )
    k = first + tl.arange(0, BLOCK_K)
    weights = tl.where(is_here, tl.reshape(weights, [BLOCK_K]), 0.0)
    tl.store(y + token * IN + k, weights, mask=k < IN)


def multiply(
    x: Tensor, weight: PackedQuantizedTensor, outs: int, bias: Tensor | None = None
) -> Tensor:
    """Returns the first `outs` outputs."""
    size, dtype = weight.in_features, weight.dtype
    assert x.shape[-1] == size and x.dtype == dtype, (x.shape, x.dtype)
    assert bias is None or (bias.dtype == dtype and bias.is_contiguous())
    x = x.contiguous()
    y = torch.empty((*x.shape[:-1], outs), dtype=dtype, device=x.device)
    count = x.numel() // size
    if count:
        # All sizes are those of the whole weight: `outs` must not change the bits of an output.
        tile = _tile(dtype, weight.out_features)
        _quantized_linear[(triton.cdiv(count, tile.rows), triton.cdiv(outs, tile.outputs))](
            x, _words(weight), bias, y, count, size, outs, *form_of(weight), tile.rows,
            tile.outputs, tile.inputs, num_warps=4, num_stages=tile.stages,
        )  # fmt: skip
    return y


def rows(ids: Tensor, weight: PackedQuantizedTensor, start: int) -> Tensor:
    """See `swell.kernels.linear.embedding_part`."""
    size = weight.in_features
    y = torch.empty((*ids.shape, size), dtype=weight.dtype, device=ids.device)
    if y.numel():
        block = min(ROW_INPUTS, triton.next_power_of_2(size))
        _quantized_embedding[(ids.numel(), triton.cdiv(size, block))](
            ids.contiguous(), _words(weight), y, start, size, weight.out_features, *form_of(weight),
            block, num_warps=4,
        )  # fmt: skip
    return y


def _words(weight: PackedQuantizedTensor) -> Tensor:
    """Returns the bytes as words of 32 bits, without a copy."""
    return weight.data.view(torch.int32)


def form_of(weight: PackedQuantizedTensor) -> tuple[object, ...]:
    """Returns GROUP, BITS, HAS_MINS, SCALES, EXPONENT and PANEL."""
    form = weight.form
    panel = weight.data.shape[2] // form.block_bytes(1)
    assert panel == PANEL, "packed for another backend"
    scales, exponent = _SCALES[form.scale_type], _EXPONENTS[form.numbers]
    return form.group, form.bits, form.has_mins, scales, exponent, PANEL


_SCALES = {torch.float16: tl.float16, torch.float32: tl.float32}
_EXPONENTS = {Numbers.INTEGERS: 0, Numbers.E2M1: 2, Numbers.E4M3: 4}


def _tile(dtype: torch.dtype, outs: int) -> Tile:
    """Returns the sizes of a program. As many rows as a tensor core of an H100 multiplies at once,
    which are also enough to dequantize in about the time of their products. Many inputs, because
    they have few bytes."""
    if dtype == torch.float32:
        return Tile(16, 32, 32, 2)
    return Tile(64, PANEL if outs < MANY_OUTPUTS else 2 * PANEL, 128, 3)
