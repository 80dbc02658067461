"""Attention of this rank's heads over its part of the KV cache."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from swell.kernels.attention import AttentionMetadata, paged_attention, write_kv


class Attention(nn.Module):
    """Attends to all K and V of each row, including those of this step, which are in the cache:
    `kernels/qkv.py` or `write_and_attend` has written them. Each step calls the module once, so
    that its hooks count progress.

    `worker/memory/kv_cache.py` binds the caches; they are neither parameters nor buffers, so that
    moving or saving the model does not affect them."""

    # [blocks, kv_heads, block_tokens, head_dim]
    k_cache: Tensor
    v_cache: Tensor

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        lookahead: int = 0,
    ) -> None:
        """`window`: how many tokens a token attends to, including itself, 0: all; `softcap`: bound
        of the scores, 0: none; `lookahead`: how many later tokens a token attends to."""
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.scale, self.window, self.softcap = scale, window, softcap
        self.lookahead = lookahead
        self.unbind_cache()

    def bind_cache(self, k_cache: Tensor, v_cache: Tensor) -> None:
        """Uses these caches from now on."""
        self.k_cache, self.v_cache = k_cache, v_cache

    def unbind_cache(self) -> None:
        """Drops the caches, so that their memory can be freed."""
        self.k_cache = self.v_cache = torch.empty(0, self.kv_heads, 1, self.head_dim)

    @property
    def caches(self) -> tuple[Tensor, Tensor]:
        """The caches of K and V."""
        return self.k_cache, self.v_cache

    def write_and_attend(self, q: Tensor, k: Tensor, v: Tensor, meta: AttentionMetadata) -> Tensor:
        """q [T, heads * head_dim], k and v [T, kv_heads * head_dim] -> [T, heads * head_dim]"""
        tokens = len(q)
        k = k.view(tokens, self.kv_heads, self.head_dim)
        v = v.view(tokens, self.kv_heads, self.head_dim)
        write_kv(k, v, self.k_cache, self.v_cache, meta.slot_mapping)
        out: Tensor = self(q.view(tokens, self.heads, self.head_dim), meta)
        return out

    def forward(self, q: Tensor, meta: AttentionMetadata) -> Tensor:
        """q [T, heads, head_dim] -> [T, heads * head_dim]"""
        out = paged_attention(
            q,
            self.k_cache,
            self.v_cache,
            meta,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            lookahead=self.lookahead,
        )
        return out.flatten(1)
