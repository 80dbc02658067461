"""The attention of one layer in decode steps, compared with the time to read its keys and values
once."""

from __future__ import annotations

import torch

from swell.kernels.attention import AttentionMetadata, paged_attention
from tests.gpu_report.scale import Figures, Scale

BLOCK_TOKENS = 16


def run(scale: Scale) -> Figures:
    heads, kv_heads, head_dim = scale.pick((32, 8, 128), (4, 2, 16))
    figures: Figures = {}
    for rows, context in scale.pick([(1, 2048), (64, 192), (64, 2048)], [(3, 40)]):
        blocks = -(-context // BLOCK_TOKENS)
        shape = rows * blocks, kv_heads, BLOCK_TOKENS, head_dim
        k_cache, v_cache = torch.randn(2, *shape, device=scale.device).bfloat16()
        q = torch.randn(rows, heads, head_dim, device=scale.device).bfloat16()
        meta = _decode_step(rows, context, blocks, scale.device)
        for label, exact in (("", False), (", exact", True)):
            own = meta._replace(exact=exact)
            seconds = scale.queued_seconds(
                lambda q=q, k=k_cache, v=v_cache, meta=own: paged_attention(
                    q, k, v, meta, scale=head_dim**-0.5
                ),
                scale.pick(50, 2),
            )
            nbytes = 2 * rows * context * kv_heads * head_dim * 2
            name = f"{rows} x {context}{label}"
            figures[f"{name}, us"] = round(seconds * 1e6, 2)
            figures[f"{name}, times the limit"] = scale.times_limit(seconds, nbytes)
    return figures


def _decode_step(rows: int, context: int, blocks: int, device: str) -> AttentionMetadata:
    """Returns the metadata of rows that compute one token each."""
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
    contexts = torch.full((rows,), context, dtype=torch.int32, device=device)
    table = torch.randperm(rows * blocks, device=device).int().view(rows, blocks)
    slots = torch.zeros(rows, dtype=torch.int64, device=device)
    return AttentionMetadata(starts, contexts, table, slots, 1, context)
