"""The paged KV cache: writes the keys and values of a step, and computes attention over it.

    k_cache[s // block_tokens, :, s % block_tokens] = k[t]    for s = slot_mapping[t], v likewise

    s[t, h, j] = scale * q[t, h] . K[j, h // group]           (group = heads / kv_heads)
    s          = softcap * tanh(s / softcap)                  if softcap > 0
    out[t, h]  = sum_j exp(s[t, h, j]) V[j, h // group] / (sum_j exp(s[t, h, j]) + exp(sinks[h]))

Token i of a row with n query tokens and c context tokens has the position p = c - n + i and attends
to the positions j <= p + lookahead below c and, with a window w > 0, j > p - w:

    positions   0 ............ c-n ......... c-1
                [ in the cache ][ this step's n ]

A cache of 8 bits stores keys and values with scales (see `swell.kernels.host.cache_format`).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from swell.kernels import backends

WHOLE_ROW = 1 << 30
"""A lookahead with which tokens attend to all later positions of their rows."""
MAX_HEAD_DIM = 256
"""The largest head that a GPU computes in one kernel, so also the largest of exact attention."""


class AttentionMetadata(NamedTuple):
    """The attention metadata of one step: a flat batch of R rows (requests) and T tokens, all on
    the caches' device."""

    # [R + 1] int32; row r owns the tokens query_start[r] .. query_start[r + 1] - 1
    query_start: Tensor
    # [R] int32, tokens of the row in the cache, including those of this step
    context_tokens: Tensor
    # [R, >= blocks of the longest row] int32; the entries of each row are dense
    block_table: Tensor
    # [T] int64, block * block_tokens + offset of each token's K and V
    slot_mapping: Tensor
    max_query_tokens: int
    max_context_tokens: int
    # Whether the bits of a token's result must depend neither on the other rows nor on the chunks
    # in which its row is computed (see `swell.kernels.linear`)
    exact: bool = False


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Stores this step's K and V; the caches change in place.

    k, v [T, kv_heads, head_dim]; caches [blocks, kv_heads, block_tokens, head_dim] of the same
    type, or [blocks, kv_heads, block_tokens, head_dim + SCALE_BYTES] of a type of `LIMITS`;
    slot_mapping [T] int64, each -1 or distinct and inside the cache. A token with -1 is padding
    (see `swell.kernels.inputs`) and is not written.

    Backends: reference, cpu (quantizes float32 and bfloat16), triton.
    """
    backends.get("attention", k.device.type).write_kv(k, v, k_cache, v_cache, slot_mapping)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    lookahead: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention over the cache, into which this step's K and V must have been written. It is
    causal, unless tokens attend to `lookahead` later positions.

    q [T, heads, head_dim]; caches as in `write_kv`; returns a new [T, heads, head_dim] of q's type;
    sinks [heads], scores without values, or None: without that term of the sum. The softmax is
    computed in float32. `heads` is a multiple of `kv_heads`. Rows may have zero query tokens.
    Tokens after the last row are padding (see `swell.kernels.inputs`), and their results are
    undefined. Backends: reference, cpu (float32, bfloat16, without sinks; always exact), triton
    (heads of up to `MAX_HEAD_DIM`; exact if `meta` says so; quantized caches with bfloat16 and
    float16, not exact).
    """
    return backends.get("attention", q.device.type).paged_attention(
        q, k_cache, v_cache, meta,
        scale=scale, window=window, softcap=softcap, lookahead=lookahead, sinks=sinks,
    )  # fmt: skip
