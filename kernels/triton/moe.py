"""Mixture of experts in six kernels: route, count, place, two grouped products, combine.

A pair is one choice of one token: pair t * k + j is choice j of token t. `_count` counts the pairs
of each expert, and `_place` groups them by expert, in blocks of BLOCK_M pairs of one expert:

    block            0           1           2           3
    pairs_of_block   [ 3 9 .. ]  [ 41 . . ]  [ 0 7 .. ]                 .: no pair
    expert_of_block  2           2           5           -1             -1: no pairs

A program of `_product` computes some outputs of one block, so it reads the weights of one expert.
All grids depend on sizes only, so that they can be captured: there are as many blocks as any
choices may need. A row of a product does not depend on the other rows of its block. Blocks have one
size if weights are packed, so that the bits of a row do not depend on the number of pairs either.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from swell.kernels.linear import Weight
from swell.kernels.moe import ALIGNMENT, ExpertTable
from swell.kernels.reference import moe as reference
from swell.kernels.triton import TYPES, Tile
from swell.kernels.triton.activation import silu
from swell.kernels.triton.linear import plain
from swell.kernels.triton.quantized import dequantized, form_of
from swell.kernels.weights.quantized import PackedQuantizedTensor

PAIRS = 1024
"""Pairs that a program counts or places at once."""
COLUMNS = 1024
"""Outputs that a program combines."""
MANY_PAIRS = 32
"""The mean number of pairs of an expert from which blocks are large."""


@triton.jit
def _route(
    logits, slots, weights, experts, logits_stride,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """logits [T, EXPERTS]; slots [T] or None; weights and experts [T, TOP_K]."""
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < EXPERTS
    at = logits + token * logits_stride + column
    x = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    p = tl.exp(x - tl.max(x, 0))
    p = p / tl.sum(p, 0)
    # Even a row of NaN chooses different experts: NaN is the largest.
    key = tl.where(x == x, x, float("inf"))
    place = tl.full([BLOCK], -1, tl.int32)  # j of each chosen expert
    for j in tl.static_range(TOP_K):
        is_free = inside & (place < 0)
        best = tl.max(tl.where(is_free, key, float("-inf")), 0)
        chosen = tl.min(tl.where(is_free & (key == best), column, BLOCK), 0)
        place = tl.where(column == chosen, j, place)
    if RENORMALIZE:
        p = p / tl.sum(tl.where(place >= 0, p, 0.0), 0)
    if slots is not None:
        is_padding = tl.load(slots + token) < 0
        p = tl.where(is_padding, 0.0, p)
        column = tl.where(is_padding, -1, column)
    tl.store(weights + token * TOP_K + place, p, mask=place >= 0)
    tl.store(experts + token * TOP_K + place, column.to(tl.int64), mask=place >= 0)


@triton.jit(do_not_specialize=["pairs"])
def _count(experts, addresses, counts, pairs, BLOCK: tl.constexpr):
    """Counts the pairs of an expert, none of an expert that is not held. experts [pairs];
    addresses and counts [E]."""
    expert, lane = tl.program_id(0), tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.int32)
    if tl.load(addresses + expert) != 0:
        for first in range(0, pairs, BLOCK):
            pair = first + lane
            chosen = tl.load(experts + pair, mask=pair < pairs, other=-1)
            found += (chosen == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["pairs", "blocks"])
def _place(
    experts, counts, pairs_of_block, expert_of_block, pairs, blocks,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the blocks of an expert; the last program also marks those after all others.
    experts [pairs]; counts [EXPERTS]; pairs_of_block [blocks, BLOCK_M]; expert_of_block [blocks].
    """
    expert, lane, other = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, BLOCK_E)
    blocks_of = tl.cdiv(tl.load(counts + other, mask=other < EXPERTS, other=0), BLOCK_M)
    first_block = tl.sum(tl.where(other < expert, blocks_of, 0), 0)
    end_block = first_block + tl.sum(tl.where(other == expert, blocks_of, 0), 0)
    place, end = first_block * BLOCK_M, end_block * BLOCK_M
    if place < end:
        for first in range(0, pairs, BLOCK):
            pair = first + lane
            is_own = tl.load(experts + pair, mask=pair < pairs, other=-1) == expert
            own = is_own.to(tl.int32)
            tl.store(pairs_of_block + place + tl.cumsum(own, 0) - 1, pair, mask=is_own)
            place += tl.sum(own, 0)
        rest = place + tl.arange(0, BLOCK_M)
        tl.store(pairs_of_block + rest, pairs, mask=rest < end)
        for first in range(first_block, end_block, BLOCK):
            block = first + lane
            tl.store(expert_of_block + block, expert, mask=block < end_block)
    if expert == EXPERTS - 1:
        for first in range(end_block, blocks, BLOCK):
            block = first + lane
            tl.store(expert_of_block + block, -1, mask=block < blocks)


@triton.jit(do_not_specialize=["pairs"])
def _product(
    x, addresses, pairs_of_block, expert_of_block, out, pairs, x_stride,
    CHOICES: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, GATED: tl.constexpr,
    GROUP: tl.constexpr, BITS: tl.constexpr, HAS_MINS: tl.constexpr, SCALES: tl.constexpr,
    EXPONENT: tl.constexpr, PANEL: tl.constexpr, ALIGNMENT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sets out[pair] = W x[pair // CHOICES], or silu(W x) * (V x) if GATED. x [rows, IN]; out
    [pairs, OUT]; addresses [E]: of W [OUT, IN], which V follows; or of both in the form of
    `quantized.py`, if GROUP is not 0."""
    block = tl.program_id(0)
    expert = tl.load(expert_of_block + block)
    if expert < 0:
        return
    pair = tl.load(pairs_of_block + block * BLOCK_M + tl.arange(0, BLOCK_M))
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_pair, inside = pair < pairs, column < OUT
    dtype = out.dtype.element_ty
    weight = tl.load(addresses + expert).to(tl.pointer_type(tl.int32 if GROUP else dtype))
    weight = tl.multiple_of(weight, ALIGNMENT)
    rows = x + (pair // CHOICES).to(tl.int64)[:, None] * x_stride
    weights = weight + column.to(tl.int64)[:, None] * IN
    # The outputs of panels after the last one are those of the first one, and are not stored.
    OUTS: tl.constexpr = tl.cdiv(OUT * (1 + GATED), PANEL) * PANEL
    of_panels = tl.where(column < OUTS, column, column % PANEL)
    next_outputs = tl.where(column + OUT < OUTS, column + OUT, column % PANEL)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    gated_total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, IN, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)[None, :]
        a = tl.load(rows + k, mask=is_pair[:, None] & (k < IN), other=0.0)
        if GROUP:
            b = dequantized(
                weight,
                of_panels,
                first,
                IN,
                GROUP,
                BITS,
                HAS_MINS,
                SCALES,
                EXPONENT,
                PANEL,
                BLOCK_K,
            ).to(dtype)
        else:
            b = tl.trans(tl.load(weights + k, mask=inside[:, None] & (k < IN), other=0.0))
        total = tl.dot(a, b, total, input_precision="ieee")
        if GATED:
            if GROUP:
                v = dequantized(
                    weight, next_outputs, first, IN, GROUP, BITS, HAS_MINS, SCALES, EXPONENT, PANEL,
                    BLOCK_K,
                ).to(dtype)  # fmt: skip
            else:
                at = weights + OUT * IN + k
                v = tl.trans(tl.load(at, mask=inside[:, None] & (k < IN), other=0.0))
            gated_total = tl.dot(a, v, gated_total, input_precision="ieee")
    if GATED:  # rounded like separate operations
        gate = silu(total.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        total = gate * gated_total.to(dtype).to(tl.float32)
    to = out + pair.to(tl.int64)[:, None] * OUT + column[None, :]
    tl.store(to, total, mask=is_pair[:, None] & inside[None, :])


@triton.jit
def _combine(outputs, weights, out, SIZE: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """outputs [T, TOP_K, SIZE]; weights [T, TOP_K]; out [T, SIZE]; all are contiguous."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        term = tl.load(outputs + pair * SIZE + column, mask=inside, other=0.0).to(tl.float32)
        total += term * tl.load(weights + pair).to(tl.float32)
    tl.store(out + token * SIZE + column, total, mask=inside)


def route(
    logits: Tensor, top_k: int, renormalize: bool, slots: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `swell.kernels.moe.route`."""
    if logits.dtype not in TYPES:
        return reference.route(logits, top_k, renormalize, slots)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens, count = logits.shape
    assert top_k <= count
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    if tokens:
        block = triton.next_power_of_2(count)
        _route[(tokens,)](
            logits, slots, weights, experts, logits.stride(0), count, top_k, renormalize, block,
            num_warps=max(1, min(8, block // 128)),
        )  # fmt: skip
    return weights, experts


def expert_outputs(x: Tensor, experts: Tensor, weights: ExpertTable, out: Tensor) -> None:
    """See `swell.kernels.moe.expert_outputs`."""
    tokens, hidden = x.shape
    if not weights or not tokens:
        return
    both = weights.alike
    if both is None or not all(_is_computed(each, x.dtype) for each in both):
        reference.expert_outputs(x, experts, weights, out)
        return
    gate_up, down = both
    exact = not (isinstance(gate_up, Tensor) and isinstance(down, Tensor))
    assert out.is_contiguous() and out.dtype == x.dtype
    x = x if x.stride(1) == 1 and not exact else x.contiguous()
    experts, pairs, count = experts.contiguous(), experts.numel(), weights.addresses.shape[1]
    tile = _tile(x.dtype, pairs, count, exact)
    # Each expert that has pairs fills all its blocks except the last.
    blocks = (pairs + min(pairs, count) * (tile.rows - 1)) // tile.rows
    groups = _group(experts, weights.addresses[0], blocks, tile.rows)
    outs = gate_up.shape[0] if isinstance(gate_up, Tensor) else gate_up.out_features
    inner = x.new_empty(pairs, outs // 2)
    _multiply(x, weights.addresses[0], groups, inner, tile, experts.shape[1], _form(gate_up), True)
    wider = tile._replace(outputs=2 * tile.outputs)
    terms = out.view(pairs, hidden)
    _multiply(inner, weights.addresses[1], groups, terms, wider, 1, _form(down), False)


def _group(experts: Tensor, addresses: Tensor, blocks: int, block_m: int) -> tuple[Tensor, Tensor]:
    """Returns `pairs_of_block` and `expert_of_block`."""
    pairs, count = experts.numel(), len(addresses)
    counts = torch.empty(count, dtype=torch.int32, device=experts.device)
    pairs_of_block = torch.empty(blocks * block_m, dtype=torch.int32, device=experts.device)
    expert_of_block = torch.empty(blocks, dtype=torch.int32, device=experts.device)
    _count[(count,)](experts, addresses, counts, pairs, PAIRS)
    _place[(count,)](
        experts, counts, pairs_of_block, expert_of_block, pairs, blocks, count,
        triton.next_power_of_2(count), block_m, PAIRS,
    )  # fmt: skip
    return pairs_of_block, expert_of_block


def _multiply(
    x: Tensor,
    addresses: Tensor,
    groups: tuple[Tensor, Tensor],
    out: Tensor,
    tile: Tile,
    choices: int,
    form: tuple[object, ...],
    gated: bool,
) -> None:
    """See `_product`."""
    pairs, outs = out.shape
    _product[(len(groups[1]), triton.cdiv(outs, tile.outputs))](
        x, addresses, *groups, out, pairs, x.stride(0), choices, x.shape[1], outs, gated, *form,
        ALIGNMENT, tile.rows, tile.outputs, tile.inputs, num_warps=4, num_stages=tile.stages,
    )  # fmt: skip


def _is_computed(weight: Weight, dtype: torch.dtype) -> bool:
    """Whether the kernel multiplies such weights with inputs of this type."""
    if dtype not in TYPES or weight.dtype != dtype:
        return False
    return isinstance(weight, PackedQuantizedTensor) or plain(weight).is_contiguous()


def _form(weight: Weight) -> tuple[object, ...]:
    """Returns GROUP, BITS, HAS_MINS, SCALES, EXPONENT and PANEL."""
    if isinstance(weight, PackedQuantizedTensor):
        return form_of(weight)
    return 0, 0, False, tl.float32, 0, 1


def _tile(dtype: torch.dtype, pairs: int, count: int, exact: bool) -> Tile:
    """Returns the sizes of a program that computes a gated product. Few pairs of an expert need
    programs that load weights fast, many need large products; exact products have one size."""
    if dtype == torch.float32:
        return Tile(16, 16, 32, 2)
    if not exact and pairs < MANY_PAIRS * count:
        return Tile(16, 32, 64, 4)
    return Tile(64, 64, 64, 3)


def combine_experts(outputs: Tensor, weights: Tensor) -> Tensor:
    """See `swell.kernels.moe.combine_experts`."""
    if outputs.dtype not in TYPES or weights.dtype not in TYPES:
        return reference.combine_experts(outputs, weights)
    outputs, weights = outputs.contiguous(), weights.contiguous()
    tokens, top_k, size = outputs.shape
    out = torch.empty(tokens, size, dtype=outputs.dtype, device=outputs.device)
    if tokens:
        # Without fused multiply-adds the sum is equal to that of the reference bit for bit.
        _combine[(tokens, triton.cdiv(size, COLUMNS))](
            outputs, weights, out, size, top_k, COLUMNS, num_warps=4, enable_fp_fusion=False
        )
    return out
