"""Paged attention in plain torch: rows are gathered and padded to the longest one. It defines the
result and is not fast."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from swell.kernels.attention import AttentionMetadata
from swell.kernels.host.cache_format import LIMITS
from swell.kernels.reference import quantized_cache
from swell.kernels.reference.padding import without_padding

MAX_ELEMENTS = 1 << 25
"""The most elements of the scores, and of the gathered keys and values in float32, that exist at
once. It limits how many rows, and queries of a row, are computed together."""


class Scoring(NamedTuple):
    """How scores are computed and masked; see `swell.kernels.attention.paged_attention`."""

    scale: float
    window: int
    softcap: float
    lookahead: int
    # [heads]
    sinks: Tensor | None


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `swell.kernels.attention.write_kv`."""
    if not len(slot_mapping):
        return
    block_tokens = k_cache.shape[2]
    source, slots, writes = without_padding(slot_mapping)
    block, offset = slots // block_tokens, slots % block_tokens
    for new, cache in ((k, k_cache), (v, v_cache)):
        if cache.dtype in LIMITS:
            quantized_cache.write(new[source], cache, block, offset, writes)
            continue
        cache[block, :, offset] = torch.where(
            writes[:, None, None], new[source], cache[block, :, offset]
        )


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
    """See `swell.kernels.attention.paged_attention`."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    rows, tokens = meta.context_tokens.shape[0], torch.arange(q.shape[0], device=q.device)
    row = torch.searchsorted(meta.query_start.long(), tokens, right=True) - 1  # [T]
    index = tokens - meta.query_start.long()[row]  # [T], of the token in its row
    index = index.clamp(max=max(0, meta.max_query_tokens - 1))  # padding may be longer than a row
    heads, context, kv_heads = q.shape[1], meta.max_context_tokens, k_cache.shape[1]
    queries = max(1, min(meta.max_query_tokens, MAX_ELEMENTS // max(1, heads * context)))
    scores, kv = context * heads * queries, 3 * context * kv_heads * q.shape[2]
    per_row = max(scores, kv, meta.max_query_tokens * heads * q.shape[2])
    chunk = max(1, MAX_ELEMENTS // max(1, per_row))
    scoring = Scoring(scale, window, softcap, lookahead, sinks)
    for first in range(0, rows if context and meta.max_query_tokens else 0, chunk):
        last = min(rows, first + chunk)
        # [rows of the chunk, Q, heads, head_dim]
        answer = _attend_rows(q, k_cache, v_cache, meta, range(first, last), queries, scoring)
        # Selected with a mask: only the device knows how many tokens the chunk has.
        inside = (row >= first) & (row < last)
        answer = answer[(row - first).clamp(0, last - first - 1), index]
        out = torch.where(inside[:, None, None], answer.to(q.dtype), out)
    return out


def _attend_rows(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    rows: range,
    at_once: int,
    scoring: Scoring,
) -> Tensor:
    """Computes these rows, padded to Q query and C context tokens, `at_once` queries at a time."""
    first, last = rows.start, rows.stop
    device, queries, context = q.device, meta.max_query_tokens, meta.max_context_tokens
    kv_heads, block_tokens = k_cache.shape[1:3]
    group = q.shape[1] // kv_heads
    start = meta.query_start[first:last].long()  # [B]
    length = meta.query_start[first + 1 : last + 1].long() - start  # [B]
    total = meta.context_tokens[first:last].long()  # [B]
    index = torch.arange(queries, device=device)  # [Q]
    real = index < length[:, None]  # [B, Q]
    token = torch.where(real, start[:, None] + index, 0)  # [B, Q]
    position = total[:, None] - length[:, None] + index  # [B, Q]

    # [B, kv_heads, group, Q, head_dim]
    rows_q = q[token].float().transpose(1, 2).unflatten(1, (kv_heads, group))
    blocks = meta.block_table[first:last, : -(-context // block_tokens)].long()  # [B, blocks]
    key_index = torch.arange(context, device=device)  # [C]
    rows_k = _read(k_cache, blocks).transpose(1, 2).flatten(2, 3)[:, :, :context]
    rows_v = _read(v_cache, blocks).transpose(1, 2).flatten(2, 3)[:, :, :context]
    # Cache entries after a row's context may contain anything, even NaN.
    rows_v = rows_v.masked_fill((key_index >= total[:, None])[:, None, :, None], 0.0)

    parts = []
    for part_q, part_position in zip(
        rows_q.split(at_once, dim=3), position.split(at_once, dim=1), strict=True
    ):
        # The queries of a group attend to the same keys: [B, kv_heads, group * Q, C], then split
        # again
        scores = part_q.flatten(2, 3) @ rows_k.transpose(-1, -2) * scoring.scale
        scores = scores.unflatten(2, (group, -1))
        if scoring.softcap > 0:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        seen = key_index <= part_position[:, :, None] + scoring.lookahead  # [B, Q, C]
        seen &= key_index < total[:, None, None]
        if scoring.window > 0:
            seen &= key_index > part_position[:, :, None] - scoring.window
        scores = scores.masked_fill_(~seen[:, None, None], float("-inf"))
        if scoring.sinks is not None:  # one more score, without a value
            sinks = scoring.sinks.float().view(kv_heads, group, 1, 1)
            scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :context]
        answer = weights.flatten(2, 3) @ rows_v
        parts.append(answer.unflatten(2, (group, -1)))
    return torch.cat(parts, dim=3).flatten(1, 2).transpose(1, 2)


def _read(cache: Tensor, blocks: Tensor) -> Tensor:
    """Returns the vectors of these blocks in float32: blocks [...] -> [..., kv_heads, block_tokens,
    head_dim]."""
    return quantized_cache.read(cache, blocks) if cache.dtype in LIMITS else cache[blocks].float()
