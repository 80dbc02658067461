"""The launch of a kernel of paged attention: its grid, its arguments, and its buffers.

The grid is (query blocks, KV heads, programs); see `tiles.py` for the query blocks. The keys of a
query block are divided among the programs of the third dimension.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from swell.kernels.attention import WHOLE_ROW, AttentionMetadata
from swell.kernels.host.cache_format import LIMITS
from swell.kernels.reference.attention import Scoring
from swell.kernels.triton.attention.vectors import as_pointer

PROGRAMS = 512
"""The number of programs up to which the keys of a query block are divided among programs: about
four for each multiprocessor of an H100."""


class Call(NamedTuple):
    """The arguments of `paged_attention`, with T > 0 tokens."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    meta: AttentionMetadata
    scoring: Scoring

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k_cache.shape[1]

    @property
    def is_quantized(self) -> bool:
        return self.k_cache.dtype in LIMITS

    @property
    def block_dim(self) -> int:
        return power(self.q.shape[2])

    @property
    def most_lines(self) -> int:
        """The most lines of a program, unless a group has more heads."""
        return 16 if self.q.dtype == torch.float32 or self.block_dim > 128 else 64

    def programs(self, block_m: int) -> int:
        """Returns the number of programs if no keys are divided."""
        blocks = len(self.q) // (block_m // self.group) + len(self.meta.context_tokens)
        return blocks * self.k_cache.shape[1]

    def _keys(self, block_m: int) -> int:
        """Returns the number of keys of a tile: as many as fit into the registers of a program.
        Quantized ones are converted in registers."""
        if self.q.dtype == torch.float32:
            return 16
        is_large = self.block_dim > 128 or block_m * self.block_dim > 64 * 64
        return (32 if is_large else 64) // (2 if self.is_quantized else 1)

    def buffers(self, programs: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns tensors for the sums of programs that divide keys, not initialized: acc
        [programs, T, heads, head_dim], m and total [programs, T, heads], all float32."""
        divided = programs if programs > 1 else 0
        acc = self.q.new_empty(divided, *self.q.shape, dtype=torch.float32)
        m, total = self.q.new_empty(2, divided, *self.q.shape[:2], dtype=torch.float32)
        return acc, m, total

    def launch(
        self,
        kernel: Any,
        out: Tensor,
        buffers: tuple[Tensor, Tensor, Tensor],
        block_m: int,
        programs: int,
        **own: Any,
    ) -> None:
        """`own`: the arguments that only this kernel has, and options of the compiler."""
        q, k_cache, v_cache, meta, (scale, window, softcap, lookahead, sinks) = self
        (_, kv_heads, block_tokens), head_dim = k_cache.shape[:3], q.shape[2]
        # By itself ptxas uses fewer registers for such tiles than they need, and spills.
        has_empty_lines = block_m % self.group > 0
        needs_registers = q.dtype == torch.float32 or has_empty_lines
        kernel[(self.programs(block_m) // kv_heads, kv_heads, programs)](
            q, as_pointer(k_cache), as_pointer(v_cache),
            meta.query_start, meta.context_tokens, meta.block_table, sinks,
            out, *buffers, len(q), len(meta.context_tokens), q.stride(0), q.stride(1),
            k_cache.stride(0), v_cache.stride(0), meta.block_table.stride(0), scale,
            window or WHOLE_ROW, softcap, lookahead, kv_heads, self.group, head_dim, block_tokens,
            block_m, self._keys(block_m), self.block_dim,
            maxnreg=255 if needs_registers and self.block_dim <= 128 else None, **own,
        )  # fmt: skip


def power(size: int) -> int:
    """Returns the power of two that is not below a size, at least 16: a product needs that."""
    return max(16, triton.next_power_of_2(size))
