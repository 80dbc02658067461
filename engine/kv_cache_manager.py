"""Gives blocks to requests and finds prefixes that were computed before."""

from __future__ import annotations

from swell.configs.schema import CacheConfig
from swell.engine.block_hash import extend_block_hashes
from swell.engine.block_pool import BlockPool
from swell.engine.request import Request


class KVCacheManager:
    """Blocks of requests over a `BlockPool`.

    Blocks may be named (made findable) as soon as the step that fills them is scheduled: any
    step that reads them runs after it.
    """

    def __init__(self, config: CacheConfig, num_blocks: int) -> None:
        self.block_tokens = config.block_tokens
        self.prefix_caching = config.prefix_caching
        self.pool = BlockPool(num_blocks)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    @property
    def usage(self) -> float:
        """Share of blocks that requests hold."""
        return 1.0 - self.pool.num_free / self.pool.num_blocks

    def admit(self, request: Request, spare_blocks: int) -> bool:
        """Hold cached and fresh blocks for all tokens that `request` knows, or none.

        The last known token is always recomputed: its logits are what the request waits for.
        `spare_blocks` must stay free, for requests that already run.
        """
        cached: list[int] = []
        if self.prefix_caching:
            self._extend_hashes(request)
            reusable = (len(request.token_ids) - 1) // self.block_tokens
            cached = self.pool.find(request.block_hashes[:reusable])
        fresh = self._blocks_for(len(request.token_ids)) - len(cached)
        if fresh + self.pool.num_free_among(cached) + spare_blocks > self.pool.num_free:
            return False
        self.pool.hold(cached)
        request.block_ids = cached + self.pool.allocate(fresh)
        request.num_named_blocks = len(cached)
        request.computed = len(cached) * self.block_tokens
        self.num_queried_tokens += len(request.token_ids)
        self.num_hit_tokens += request.computed
        return True

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Blocks added so that `num_tokens` fit; None if there are not enough."""
        missing = self._blocks_for(num_tokens) - len(request.block_ids)
        if missing <= 0:
            return []
        if missing > self.pool.num_free:
            return None
        blocks = self.pool.allocate(missing)
        request.block_ids += blocks
        return blocks

    def name_full_blocks(self, request: Request) -> None:
        """Make findable what is computed (or in flight) and whose tokens the host knows."""
        if not self.prefix_caching:
            return
        full = min(request.computed, len(request.token_ids)) // self.block_tokens
        if full <= request.num_named_blocks:
            return
        self._extend_hashes(request)
        for index in range(request.num_named_blocks, full):
            self.pool.name(request.block_ids[index], request.block_hashes[index])
        request.num_named_blocks = full

    def release(self, request: Request) -> None:
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_named_blocks = 0

    def forget(self) -> None:
        """Find no prefix that was computed before: its content may be lost. Nobody holds blocks."""
        self.pool.check_idle()
        self.pool.forget()

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def _extend_hashes(self, request: Request) -> None:
        extend_block_hashes(
            request.block_hashes, request.token_ids, self.block_tokens, request.core.cache_salt
        )
