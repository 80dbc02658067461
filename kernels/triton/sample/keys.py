"""The order of a row's tokens as integers: by logit, and equal logits by token id, the lower one
first. A larger integer is a more likely token.

    order   int32, of a logit                      equal for 0 and -0; NaN is above all others
    key     int64, order << 32 | (2^32 - 1 - token)           distinct for the tokens of a row
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_KEY = tl.constexpr(-(1 << 63))
"""A key below those of all tokens."""


@triton.jit
def order_of(logit):
    """Returns the int32 order of float32 logits."""
    logit = tl.where(logit == 0, 0.0, logit)
    bits = logit.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(logit != logit, 0x7FFFFFFF, order)


@triton.jit
def logit_of(order):
    """Returns the float32 logit of an order."""
    order = order.to(tl.int32)
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def key_of(logit, token):
    """Returns the int64 keys of tokens with float32 logits."""
    return ordered_key(order_of(logit), token)


@triton.jit
def ordered_key(order, token):
    """Returns the int64 key of a token whose logit has this order."""
    return (order.to(tl.int64) << 32) | (0xFFFFFFFF - token.to(tl.int64))


@triton.jit
def token_of(key):
    """Returns the token of a key."""
    return 0xFFFFFFFF - (key & 0xFFFFFFFF)
