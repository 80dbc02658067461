"""Adapters in two kernels for all adapters of a step: `_shrink` computes A x, `_expand` adds B A x.

A program computes BLOCK_M tokens of one group (see `LoraTokens.groups`), that is of one adapter,
which it finds by binary search. Group g has the blocks begin // BLOCK_M + g and following ones, so
the grid depends on the number of tokens only; some blocks are empty. The weights of an adapter are
found by their addresses in the device's memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from swell.kernels.lora import LoraLayer, LoraTokens, LoraWeights
from swell.kernels.reference import lora as reference
from swell.kernels.triton import TYPES

BLOCK_M = 16
"""Tokens of a program: the smallest number that `tl.dot` accepts."""
BLOCK_R = 16
"""Ranks of a program, or of one step of its loop."""
BLOCK_N = 64
"""Outputs of a program."""
BLOCK_K = 128
"""Inputs of one step of the loop."""


@triton.jit
def _tokens_of(block, groups, BLOCK_M: tl.constexpr):
    """Returns the adapter of a block, the first of its tokens, and the end of its group's tokens,
    which is not after the first one if the block is empty."""
    count = tl.load(groups)
    low, high = count * 0, count - 1
    while low < high:  # the last group whose first block is not after `block`
        middle = (low + high + 1) // 2
        if tl.load(groups + 2 + 3 * middle) // BLOCK_M + middle <= block:
            low = middle
        else:
            high = middle - 1
    begin = tl.load(groups + 2 + 3 * low)
    first = begin + (block - begin // BLOCK_M - low) * BLOCK_M
    end = tl.where(count > 0, tl.load(groups + 3 + 3 * low), 0)
    return tl.load(groups + 1 + 3 * low), first, end


@triton.jit
def _shrink(
    x, downs, ranks, tokens, groups, inner, x_stride,
    IN: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes A x in float32. x [T, IN]; downs [adapters]: the address of A; ranks
    [adapters, PARTS + 1]: where each matrix begins among the ranks; inner [blocks, BLOCK_M, RANKS].
    """
    block = tl.program_id(0).to(tl.int64)
    adapter, start, end = _tokens_of(block, groups, BLOCK_M)
    if start >= end:
        return
    index = start + tl.arange(0, BLOCK_M)
    rank = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    address, count = tl.load(downs + adapter), tl.load(ranks + adapter * (PARTS + 1) + PARTS)
    if address == 0 or tl.program_id(1) * BLOCK_R >= count:
        return
    is_token, inside = index < end, rank < count
    token = tl.load(tokens + index, mask=is_token, other=0)
    down = address.to(tl.pointer_type(x.dtype.element_ty))
    total = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for first in range(0, IN, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)[None, :]
        of_x = x + token[:, None] * x_stride + k
        a = tl.load(of_x, mask=is_token[:, None] & (k < IN), other=0.0)
        of_down = down + rank[:, None] * IN + k
        b = tl.load(of_down, mask=inside[:, None] & (k < IN), other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    line = block * BLOCK_M + tl.arange(0, BLOCK_M)
    to = inner + line[:, None] * RANKS + rank[None, :]
    tl.store(to, total, mask=is_token[:, None] & inside[None, :])


@triton.jit
def _expand(
    inner, ups, ranks, firsts, tokens, groups, y,
    OUTS: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds B inner to y [T, OUTS]. ups [adapters, PARTS]: the address of each B; firsts
    [PARTS + 1]: the first output of each matrix."""
    block, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    adapter, start, end = _tokens_of(block, groups, BLOCK_M)
    if start >= end:
        return
    index = start + tl.arange(0, BLOCK_M)
    outs = tl.load(firsts + part + 1) - tl.load(firsts + part)
    out = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    of_ranks = ranks + adapter * (PARTS + 1) + part
    first_rank, count = tl.load(of_ranks), tl.load(of_ranks + 1) - tl.load(of_ranks)
    if count == 0 or tl.program_id(1) * BLOCK_N >= outs:
        return
    is_token, inside = index < end, out < outs
    token = tl.load(tokens + index, mask=is_token, other=0)
    up = tl.load(ups + adapter * PARTS + part).to(tl.pointer_type(y.dtype.element_ty))
    line = block * BLOCK_M + tl.arange(0, BLOCK_M)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, count, BLOCK_R):
        rank = first + tl.arange(0, BLOCK_R)[None, :]
        of_inner = inner + line[:, None] * RANKS + first_rank + rank
        h = tl.load(of_inner, mask=is_token[:, None] & (rank < count), other=0.0)
        of_up = up + out[:, None] * count + rank
        b = tl.load(of_up, mask=inside[:, None] & (rank < count), other=0.0)
        total = tl.dot(h, tl.trans(b.to(tl.float32)), total, input_precision="ieee")
    at = y + token[:, None] * OUTS + tl.load(firsts + part) + out[None, :]
    is_written = is_token[:, None] & inside[None, :]
    tl.store(at, tl.load(at, mask=is_written, other=0.0).to(tl.float32) + total, mask=is_written)


class TritonLora(LoraLayer):
    """See `swell.kernels.lora.LoraLayer`. Its tables are changed in place, because captured steps
    read them."""

    def __init__(
        self,
        size: int,
        outs: Sequence[int],
        adapters: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        parts = len(outs)
        self._size, self._outs, self._dtype = size, outs, dtype
        self._max_ranks = parts * max_rank
        self._kept: dict[int, LoraWeights] = {}
        """Adapter -> the weights whose addresses the tables have."""
        # [adapters], [adapters, parts] int64: addresses; 0: no weights
        self._downs = torch.zeros(adapters, dtype=torch.int64, device=device)
        self._ups = torch.zeros(adapters, parts, dtype=torch.int64, device=device)
        # [adapters, parts + 1], [parts + 1] int32: where the ranks and outputs of each part begin
        self._ranks = torch.zeros(adapters, parts + 1, dtype=torch.int32, device=device)
        firsts = [sum(outs[:part]) for part in range(parts + 1)]
        self._firsts = torch.tensor(firsts, dtype=torch.int32, device=device)

    def set(self, adapter: int, weights: LoraWeights | None) -> None:
        if weights is None:
            for table in (self._downs, self._ups, self._ranks):
                table[adapter] = 0
            self._kept.pop(adapter, None)
            return
        tensors = (weights.down, *(up for up in weights.ups if up is not None))
        assert all(x.dtype == self._dtype and x.is_contiguous() for x in tensors)
        counts = [0 if up is None else up.shape[1] for up in weights.ups]
        assert weights.down.shape == (sum(counts), self._size) and sum(counts) <= self._max_ranks
        ups = [0 if up is None else up.data_ptr() for up in weights.ups]
        self._ups[adapter] = torch.tensor(ups, dtype=torch.int64)
        firsts = [sum(counts[:part]) for part in range(len(counts) + 1)]
        self._ranks[adapter] = torch.tensor(firsts, dtype=torch.int32)
        self._downs[adapter] = weights.down.data_ptr()
        self._kept[adapter] = weights

    def add(self, x: Tensor, y: Tensor, tokens: LoraTokens) -> None:
        assert x.dtype == y.dtype == self._dtype and y.is_contiguous(), (x.dtype, y.stride())
        assert x.shape[1] == self._size and y.shape[1] == sum(self._outs), (x.shape, y.shape)
        x = x if x.stride(1) == 1 else x.contiguous()
        count, ranks, parts = len(x), self._max_ranks, len(self._outs)
        if not count:
            return
        blocks = count // BLOCK_M + min(count, tokens.max_groups)
        inner = x.new_empty(blocks * BLOCK_M, ranks, dtype=torch.float32)
        of_step = tokens.tokens, tokens.groups_tensor
        _shrink[(blocks, triton.cdiv(ranks, BLOCK_R))](
            x, self._downs, self._ranks, *of_step, inner, x.stride(0), self._size, parts, ranks,
            BLOCK_M, BLOCK_R, BLOCK_K, num_warps=4, num_stages=3,
        )  # fmt: skip
        _expand[(blocks, triton.cdiv(max(self._outs), BLOCK_N), parts)](
            inner, self._ups, self._ranks, self._firsts, *of_step, y, y.shape[1], parts, ranks,
            BLOCK_M, BLOCK_R, BLOCK_N, num_warps=4, num_stages=2,
        )  # fmt: skip


def make_layer(
    size: int,
    outs: Sequence[int],
    adapters: int,
    max_rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> LoraLayer:
    """See `swell.kernels.lora.make_layer`."""
    if dtype not in TYPES:
        return reference.make_layer(size, outs, adapters, max_rank, dtype, device)
    return TritonLora(size, outs, adapters, max_rank, dtype, device)
