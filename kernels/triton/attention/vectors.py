"""The vectors of the paged cache: K and V in the type of the model, or quantized with a scale for
each vector (see `swell.kernels.attention`).

Kernels get a cache of float8 as one of `uint8`, and convert its numbers with operations on bits,
which all GPUs have. A float8 with its bits in the place of a float16's is 2 ** -8 times as large.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from swell.kernels.host.cache_format import LIMITS, SCALE_BYTES, head_dim_of
from swell.kernels.triton import TYPES

_16_BITS = (torch.bfloat16, torch.float16)
"""The types of queries over quantized caches: float32 ones take too many registers."""
_SCALE_BYTES = tl.constexpr(SCALE_BYTES)
_INT8_LIMIT = tl.constexpr(LIMITS[torch.int8])
_FLOAT8_LIMIT = tl.constexpr(LIMITS[torch.float8_e4m3fn])
_FLOAT8_UNIT = tl.constexpr(256.0)


def is_computed(x: Tensor, cache: Tensor) -> bool:
    """Whether kernels read and write vectors of the type of `x` in this cache."""
    if cache.dtype not in LIMITS:
        return x.dtype in TYPES and x.dtype == cache.dtype
    has_aligned_scales = cache.shape[2] * head_dim_of(cache) % SCALE_BYTES == 0
    return x.dtype in _16_BITS and has_aligned_scales


def as_pointer(cache: Tensor) -> Tensor:
    """Returns the cache as kernels get it."""
    assert cache[0].is_contiguous()
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


@triton.constexpr_function
def is_quantized(cache_type):
    """Whether caches with pointers to this type are quantized."""
    return cache_type in (tl.int8, tl.uint8)


@triton.constexpr_function
def part_size(cache_type, block_tokens, dim):
    """Returns the number of elements of one block and KV head."""
    return block_tokens * (dim + SCALE_BYTES if cache_type in (tl.int8, tl.uint8) else dim)


@triton.jit
def _scales_of(cache, part, index, BLOCK_TOKENS: tl.constexpr, DIM: tl.constexpr):
    """Returns the addresses of scales."""
    at = cache + part + BLOCK_TOKENS * DIM + index * _SCALE_BYTES
    return at.to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def load_vectors(
    cache, part, index, inside, column, dtype: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """Returns the vectors [N, BLOCK_DIM] as `dtype`, without their scales, and the scales [N]. part
    [N]: the first element of the block and KV head; index [N]: of the vector in the block; inside
    [N]: whether it is loaded, instead of zeros; column [BLOCK_DIM]."""
    at = (part + index * DIM)[:, None] + column[None, :]
    values = tl.load(cache + at, mask=inside[:, None] & (column < DIM)[None, :], other=0)
    if is_quantized(cache.dtype.element_ty):
        scales = tl.load(_scales_of(cache, part, index, BLOCK_TOKENS, DIM), mask=inside, other=0.0)
        if cache.dtype.element_ty == tl.uint8:
            bits = values.to(tl.int32)
            half = (((bits & 0x7F) << 7) | ((bits & 0x80) << 8)).to(tl.uint16)
            return half.to(tl.float16, bitcast=True).to(dtype), scales * _FLOAT8_UNIT
        else:
            return values.to(tl.float32).to(dtype), scales
    else:
        return values, tl.full(index.shape, 1.0, tl.float32)


@triton.jit
def store_vector(
    cache, part, index, column, values, writes, BLOCK_TOKENS: tl.constexpr, DIM: tl.constexpr
):
    """Stores one vector [BLOCK] if `writes`; `part` and `index` as in `load_vectors`. The kernel
    must be compiled without fused multiply-adds."""
    inside, at = writes & (column < DIM), cache + part + index * DIM + column
    if is_quantized(cache.dtype.element_ty):
        x = tl.where(column < DIM, values.to(tl.float32), 0.0)
        largest_bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)  # NaN is the largest
        largest = largest_bits.to(tl.float32, bitcast=True)
        is_zero = largest < 7.888609052210118e-31  # 2 ** -100
        is_scaled = (largest_bits < 0x7F800000) & (is_zero == 0)
        is_float8: tl.constexpr = cache.dtype.element_ty == tl.uint8
        limit: tl.constexpr = _FLOAT8_LIMIT if is_float8 else _INT8_LIMIT
        scale = tl.where(is_zero, 0.0, tl.div_rn(largest, limit))
        quotient = tl.div_rn(tl.where(is_scaled, x, 0.0), tl.where(is_scaled, scale, 1.0))
        rounded = float8(quotient) if is_float8 else _int8(quotient)
        tl.store(at, rounded.to(cache.dtype.element_ty), mask=inside)
        tl.store(_scales_of(cache, part, index, BLOCK_TOKENS, DIM), scale, mask=writes)
    else:
        tl.store(at, values, mask=inside)


@triton.jit
def _int8(x):
    """Returns the nearest integers; ties to even."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # 1.5 * 2 ** 23


@triton.jit
def float8(x):
    """Returns the bits of the nearest numbers; ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # The low bits of the sum count steps of 2 ** -9.
    steps = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    rounded = tl.where(magnitude < 0x3C800000, steps, normal)  # 2 ** -6: subnormal numbers
    return rounded | ((bits >> 24) & 0x80)
