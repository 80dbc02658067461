"""Noise and sampling, without a sort. Sampling takes four launches, greedy sampling two:

    row     [ split 0 ][ split 1 ] ...    one program each: its best key
              one program for the row     the least key that top_k and top_p keep: `filters.py`
            [ split 0 ][ split 1 ] ...    one program each: the sum of its kept weights
              one program for the row     the split in which the sum passes the target, and the
                                          token there

The second launch is left out if no row uses top_k or top_p. Sums of splits are float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from swell.kernels.reference import sample as reference
from swell.kernels.triton import TYPES
from swell.kernels.triton.sample.filters import least_key, weights_of
from swell.kernels.triton.sample.keys import NO_KEY, key_of, logit_of, token_of

BLOCK = 4096
"""Tokens of a split."""
PASS_BLOCK = 2048
"""Tokens that the search of a row reads at once: with more it would spill registers."""
NUMBERS = 128
"""Random numbers of a program."""

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(z):
    """The finalizer of SplitMix64, of uint64."""
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def _noise(seeds, positions, out, seed_stride, position_stride, count, NUMBERS: tl.constexpr):
    i = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    seed = tl.load(seeds + i * seed_stride, mask=i < count, other=0)
    position = tl.load(positions + i * position_stride, mask=i < count, other=0)
    seed, position = seed.to(tl.uint64, bitcast=True), position.to(tl.uint64, bitcast=True)
    hashed = _mix(_mix(seed + _GOLDEN) + (position + 1) * _GOLDEN) >> 11
    # The conversion and the product are exact.
    tl.store(out + i, hashed.to(tl.int64).to(tl.float64) * 2.0**-53, mask=i < count)


@triton.jit
def _find_best(logits, best, logits_stride, vocab, splits, BLOCK: tl.constexpr):
    """logits [N, vocab] -> best [N, splits]: the largest key of each split."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = split * BLOCK + tl.arange(0, BLOCK)
    at = logits + row * logits_stride + token
    x = tl.load(at, mask=token < vocab, other=float("-inf")).to(tl.float32)
    tl.store(best + row * splits + split, tl.max(key_of(x, token)))


@triton.jit
def _best_of(best, row, splits, SPLITS: tl.constexpr):
    """Returns the largest key of a row."""
    split = tl.arange(0, SPLITS)
    return tl.max(tl.load(best + row * splits + split, mask=split < splits, other=NO_KEY))


@triton.jit
def _take_best(best, out, max_logits, splits, SPLITS: tl.constexpr):
    """out, max_logits [N]: the most likely token of each row, and its logit."""
    row = tl.program_id(0).to(tl.int64)
    key = _best_of(best, row, splits, SPLITS)
    tl.store(out + row, token_of(key))
    tl.store(max_logits + row, logit_of(key >> 32))


@triton.jit
def _find_least(
    logits, temperature, top_k, top_p, min_p, best, least, logits_stride, temperature_stride,
    top_k_stride, top_p_stride, min_p_stride, vocab, splits,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """least [N]: the least key that top_k and top_p keep; undefined for greedy rows."""
    row = tl.program_id(0).to(tl.int64)
    top = logit_of(_best_of(best, row, splits, SPLITS) >> 32)
    own_temperature = tl.load(temperature + row * temperature_stride)
    if own_temperature > 0:
        key = least_key(
            logits + row * logits_stride, vocab, top, own_temperature,
            tl.load(top_k + row * top_k_stride), tl.load(top_p + row * top_p_stride),
            tl.load(min_p + row * min_p_stride), BLOCK,
        )  # fmt: skip
        tl.store(least + row, key)


@triton.jit
def _weigh(
    logits, temperature, min_p, least, row, split, top, logits_stride, temperature_stride,
    min_p_stride, vocab, FILTERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns the tokens of a split, and their float64 weights: 0 for those that are excluded."""
    token = split * BLOCK + tl.arange(0, BLOCK)
    at = logits + row * logits_stride + token
    x = tl.load(at, mask=token < vocab, other=float("-inf"))
    own_temperature = tl.load(temperature + row * temperature_stride)
    weight = weights_of(x, top, own_temperature, tl.load(min_p + row * min_p_stride))
    if FILTERS:
        weight = tl.where(key_of(x, token) >= tl.load(least + row), weight, 0.0)
    return token, weight.to(tl.float64)


@triton.jit
def _sum_weights(
    logits, temperature, min_p, best, least, sums, logits_stride, temperature_stride, min_p_stride,
    vocab, splits, FILTERS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """sums [N, splits] float64: the weights that each split keeps; undefined for greedy rows."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top = logit_of(_best_of(best, row, splits, SPLITS) >> 32)
    _token, weight = _weigh(
        logits, temperature, min_p, least, row, split, top, logits_stride, temperature_stride,
        min_p_stride, vocab, FILTERS, BLOCK,
    )  # fmt: skip
    tl.store(sums + row * splits + split, tl.sum(weight))


@triton.jit
def _draw(
    logits, temperature, min_p, u, best, least, sums, out, max_logits, logits_stride,
    temperature_stride, min_p_stride, u_stride, vocab, splits,
    FILTERS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out, max_logits [N]: the sampled token of each row, and the largest logit."""
    row, index = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS)
    key = _best_of(best, row, splits, SPLITS)
    top, drawn = logit_of(key >> 32), token_of(key)
    if tl.load(temperature + row * temperature_stride) > 0:
        own_sums = tl.load(sums + row * splits + index, mask=index < splits, other=0.0)
        reached = tl.cumsum(own_sums)
        # u is below 1, so the target is below the largest of these sums.
        target = tl.load(u + row * u_stride) * tl.max(reached)
        split = _first(index, own_sums, reached, target)
        before = tl.sum(tl.where(index < split, own_sums, 0.0))
        token, weight = _weigh(
            logits, temperature, min_p, least, row, split, top, logits_stride, temperature_stride,
            min_p_stride, vocab, FILTERS, BLOCK,
        )  # fmt: skip
        drawn = _first(token, weight, before + tl.cumsum(weight), target).to(tl.int64)
    tl.store(out + row, drawn)
    tl.store(max_logits + row, top)


@triton.jit
def _first(index, weight, reached, target):
    """Returns the first index with a weight at which the sum passes the target; if there is none
    because of rounding, the last one with a weight; the first index if none has a weight."""
    lowest = tl.min(index)
    beyond = tl.max(index) + 1
    # Neighbouring sums of a parallel scan may have different roundings, so that a sum can also pass
    # the target at an index without weight.
    last = tl.max(tl.where(weight > 0, index, lowest))
    return tl.minimum(last, tl.min(tl.where((weight > 0) & (reached > target), index, beyond)))


def uniform_noise(seeds: Tensor, positions: Tensor) -> Tensor:
    """See `swell.kernels.sample.uniform_noise`."""
    assert seeds.dtype == positions.dtype == torch.int64 and seeds.shape == positions.shape
    out = torch.empty(len(seeds), dtype=torch.float64, device=seeds.device)
    if count := len(seeds):
        _noise[(triton.cdiv(count, NUMBERS),)](
            seeds, positions, out, seeds.stride(0), positions.stride(0), count, NUMBERS, num_warps=4
        )
    return out


def greedy_sample(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `swell.kernels.sample.greedy_sample`."""
    if logits.dtype not in TYPES:
        return reference.greedy_sample(logits)
    out, max_logits = _outputs(logits)
    if len(logits):
        best, splits = _best(logits)
        _take_best[(len(logits),)](
            best, out, max_logits, splits, triton.next_power_of_2(splits), num_warps=1
        )
    return out, max_logits


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    u: Tensor,
    *,
    any_top_k_or_p: bool = True,
) -> tuple[Tensor, Tensor]:
    """See `swell.kernels.sample.sample_tokens`."""
    assert logits.dtype == temperature.dtype == top_p.dtype == min_p.dtype == torch.float32
    assert top_k.dtype == torch.int64 and u.dtype == torch.float64
    out, max_logits = _outputs(logits)
    if rows := len(logits):
        best, splits = _best(logits)
        least = best[:, 0]  # not read without filters
        if any_top_k_or_p:
            least = _least(logits, temperature, top_k, top_p, min_p, best)
        sums = torch.empty(rows, splits, dtype=torch.float64, device=logits.device)
        strides = logits.stride(0), temperature.stride(0), min_p.stride(0)
        sizes = logits.shape[1], splits
        variant = any_top_k_or_p, triton.next_power_of_2(splits), BLOCK
        _sum_weights[(rows, splits)](
            logits, temperature, min_p, best, least, sums, *strides, *sizes, *variant, num_warps=8
        )
        _draw[(rows,)](
            logits, temperature, min_p, u, best, least, sums, out, max_logits, *strides,
            u.stride(0), *sizes, *variant, num_warps=8,
        )  # fmt: skip
    return out, max_logits


def _least(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, best: Tensor
) -> Tensor:
    """Returns [N] int64: the least key that top_k and top_p keep in each row; undefined for greedy
    rows."""
    rows, splits = best.shape
    least = torch.empty(rows, dtype=torch.int64, device=logits.device)
    params = logits, temperature, top_k, top_p, min_p
    _find_least[(rows,)](
        *params, best, least, *(x.stride(0) for x in params), logits.shape[1], splits,
        triton.next_power_of_2(splits), PASS_BLOCK, num_warps=16,
    )  # fmt: skip
    return least


def _outputs(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns tokens and largest logits, not initialized."""
    assert logits.stride(1) == 1
    rows = len(logits)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    return tokens, torch.empty(rows, dtype=torch.float32, device=logits.device)


def _best(logits: Tensor) -> tuple[Tensor, int]:
    """Returns the best keys of the splits of each row, and the number of splits."""
    rows, vocab = logits.shape
    splits = triton.cdiv(vocab, BLOCK)
    best = torch.empty(rows, splits, dtype=torch.int64, device=logits.device)
    _find_best[(rows, splits)](logits, best, logits.stride(0), vocab, splits, BLOCK, num_warps=8)
    return best, splits
