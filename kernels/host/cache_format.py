"""The form of a KV cache of 8 bits.

A cache of `int8` or `float8_e4m3fn` stores each vector x of a token and KV head with a scale of its
own. The scale depends on nothing else, so the content of a block does not depend on the steps in
which it was written:

    scale    = max |x| / limit         (limit = 127 or 448, `LIMITS`)
    value    = round(x / scale)        (to the nearest integer, or to the nearest float8)
    K, V     = value * scale           (in float32)

    [block, kv head]   [ block_tokens vectors of head_dim values ][ block_tokens float32 scales ]

The difference is bounded: |K - k| <= scale / 2 = max |k| / 254 with int8, and at most the larger of
|k| / 16 and scale / 1024 with float8. A vector whose numbers are all below `SMALLEST` is stored as
zeros, and one that contains a number that is not finite has a scale that is not finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The types of quantized caches, and the largest value of each."""
SMALLEST = 2.0**-100
"""Vectors below this are stored as zeros, so that no scale is subnormal."""
SCALE_BYTES = 4
"""The bytes of the scale of a vector in a quantized cache."""


def cache_width(head_dim: int, dtype: torch.dtype) -> int:
    """Returns the last dimension of a cache of this type."""
    return head_dim + SCALE_BYTES if dtype in LIMITS else head_dim


def head_dim_of(cache: Tensor) -> int:
    """Returns the size of the heads in a cache."""
    return cache.shape[3] - SCALE_BYTES if cache.dtype in LIMITS else cache.shape[3]
