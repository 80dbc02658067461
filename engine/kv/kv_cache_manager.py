"""Allocates KV blocks for requests and finds prefixes that were computed before."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from swell.configs.schema import CacheConfig
from swell.engine.kv.block_hash import extend_block_hashes
from swell.engine.kv.block_pool import BlockPool
from swell.engine.kv.handover_reads import Claim, claim_nothing
from swell.engine.kv.offload_tiers import OffloadTiers
from swell.engine.request import HandoverState, Request
from swell.worker.wire import BlockFile


class PrefixLeader(NamedTuple):
    """The prefix that a waiting request waits for, because requests ahead of it compute it."""

    block_hash: bytes
    """The hash of the last block of that prefix."""
    own_blocks: int
    """Number of blocks that the waiting request needs after the prefix."""


class KVCacheManager:
    """Manages the blocks of requests in a `BlockPool`.

    Blocks may be added to the prefix cache as soon as the step that fills them is scheduled: any
    step that reads them runs after it. Until then, a block that a running request holds for tokens
    it knows is *in flight*: it is cached as the request proceeds, or dropped when the request frees
    its blocks.
    """

    def __init__(
        self,
        config: CacheConfig,
        num_blocks: int,
        offload_blocks: Sequence[int] = (),
        claim_file: Claim = claim_nothing,
    ) -> None:
        """`offload_blocks`: sizes of the offload tiers, in blocks. `claim_file` claims a file with
        blocks that another engine has written."""
        self.block_tokens = config.block_tokens
        self.prefix_caching = config.prefix_caching
        self.offload = OffloadTiers(offload_blocks)
        max_kept = int(config.session_fraction * num_blocks)
        self.pool = BlockPool(num_blocks, self.offload.save, max_kept)
        self._claim_file = claim_file
        self._imports: list[BlockFile] = []
        self._in_flight_blocks: dict[bytes, Request] = {}
        """Hash -> the request that will compute the block; if there are several, the first in
        policy order."""
        self.num_queried_tokens = 0
        """Number of prompt tokens that were looked up, counted once per request."""
        self.num_hit_tokens = 0
        """Number of these tokens that were found."""

    @property
    def usage(self) -> float:
        """Share of blocks that requests hold."""
        return 1.0 - self.pool.num_free / self.pool.num_blocks

    def admit(self, request: Request, spare_blocks: int) -> bool:
        """Allocates cached and new blocks for all known tokens of `request`; returns False, without
        changes, if there are not enough.

        The last known token is always recomputed, because the request needs its logits.
        `spare_blocks` must remain free for requests that already run.
        """
        block_hashes = self._reusable_hashes(request)
        found = self._find(block_hashes)
        if not self._has_room(request, found, spare_blocks):
            return False
        if self._claim(request):
            found = self._find(block_hashes, is_whole=True)
        cached = [block for block in found.values() if block is not None]
        fresh = self._blocks_for(len(request.token_ids)) - len(cached)
        self.pool.touch(cached)
        file = request.core.handed_over if request.handover is HandoverState.READ else ""
        request.block_ids = self._hold(found, fresh, file)
        request.handover = HandoverState.NONE
        request.block_capacity_tokens = len(request.block_ids) * self.block_tokens
        request.computed = len(found) * self.block_tokens
        self._set_num_cached_blocks(request, len(found))
        self._count_lookup(request)
        self._register_in_flight(request)
        return True

    def wait_for_prefix(
        self, request: Request, prefix_leader: PrefixLeader | None
    ) -> PrefixLeader | None:
        """Returns the prefix that `request` should wait for, if its next missing block is in flight
        for a request ahead of it.

        `prefix_leader` is the result of the previous call. If it is still valid, a call takes one
        lookup; otherwise one lookup for each block of the prefix.
        """
        if prefix_leader is not None and self._is_in_flight(prefix_leader.block_hash, request):
            return prefix_leader
        if request.handover is HandoverState.EXPECTED:
            return None
        block_hashes = self._reusable_hashes(request)
        found = shared = len(self._find(block_hashes))
        while shared < len(block_hashes) and self._is_in_flight(block_hashes[shared], request):
            shared += 1
        if shared == found:
            return None
        return PrefixLeader(
            block_hashes[shared - 1], self._blocks_for(len(request.token_ids)) - shared
        )

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Allocates blocks so that `num_tokens` fit and returns them; None if there are not
        enough."""
        missing = self._blocks_for(num_tokens) - len(request.block_ids)
        if missing <= 0:
            return []
        if missing > self.pool.num_free:
            return None
        blocks = self.pool.allocate(missing)
        request.block_ids += blocks
        request.block_capacity_tokens += missing * self.block_tokens
        return blocks

    def cache_full_blocks(self, request: Request) -> None:
        """Adds blocks to the prefix cache that are computed (or in flight) and whose tokens the
        host knows. Does nothing below `request.cacheable_tokens`."""
        full = min(request.computed, len(request.token_ids)) // self.block_tokens
        if full <= request.num_cached_blocks:
            return
        self._extend_hashes(request)
        for index in range(request.num_cached_blocks, full):
            self.pool.cache_block(request.block_ids[index], request.block_hashes[index])
            self._unregister_in_flight(request.block_hashes[index], request)
        self._set_num_cached_blocks(request, full)

    def free(self, request: Request) -> None:
        for block_hash in request.block_hashes[request.num_cached_blocks :]:
            self._unregister_in_flight(block_hash, request)
        self.pool.free(request.block_ids, keep=request.core.keep_blocks)
        request.block_ids = []
        request.block_capacity_tokens = request.num_cached_blocks = 0

    def evict_computed(self, request: Request) -> None:
        """Removes the blocks that `request` has computed from the prefix cache, because they are
        invalid. Uses the hashes, because the request may have been preempted and have freed its
        blocks."""
        self.pool.evict_hashes(request.block_hashes)
        self.offload.forget(request.block_hashes)

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache, because its content may be lost. No block may be in use."""
        self.check_idle()
        self.pool.reset_prefix_cache()
        self.offload.reset()
        self._imports.clear()

    def check_idle(self) -> None:
        """Raises AssertionError unless every block is free and no block is in flight."""
        self.pool.check_idle()
        num_blocks = len(self._in_flight_blocks)
        assert not num_blocks, f"{num_blocks} blocks are in flight without a request"

    def exported(self, request: Request) -> BlockFile:
        """Returns all blocks of a request whose prompt fills them, for export to a file."""
        blocks = request.block_ids[: request.prompt_tokens // self.block_tokens]
        return BlockFile(request.core.hand_over, list(range(len(blocks))), blocks)

    def take_imports(self) -> list[BlockFile]:
        """Returns the blocks that the next step must read from files."""
        imports, self._imports = self._imports, []
        return imports

    def _has_room(
        self, request: Request, found: dict[bytes, int | None], spare_blocks: int
    ) -> bool:
        cached = [block for block in found.values() if block is not None]
        fresh = self._blocks_for(len(request.token_ids)) - len(cached)
        return fresh + self.pool.num_free_among(cached) + spare_blocks <= self.pool.num_free

    def _claim(self, request: Request) -> bool:
        """Claims a handover file of a request that starts, if another engine has computed its
        prompt. The file is read only once: after a preemption the request starts without it."""
        if request.handover is HandoverState.EXPECTED and self.prefix_caching:
            is_there = self._claim_file(request.core.handed_over)
            request.handover = HandoverState.READ if is_there else HandoverState.NONE
            return is_there
        return False

    def _find(
        self, block_hashes: list[bytes], *, is_whole: bool = False
    ) -> dict[bytes, int | None]:
        """Returns the longest run of existing blocks for a chain of hashes. The value is the block
        on the device, or None if the block is in an offload tier or, with `is_whole`, in a file."""
        found: dict[bytes, int | None] = {}
        for block_hash in block_hashes:
            block = self.pool.get_cached_block(block_hash)
            if block is None and not is_whole and not self.offload.has(block_hash):
                break
            found[block_hash] = block
        return found

    def _hold(self, found: dict[bytes, int | None], fresh: int, file: str) -> list[int]:
        """Returns the blocks of a request: those that were found, which are copied to the device if
        they are not there, then new ones. `fresh`: number of blocks to allocate for both. `file`:
        the handover file with the blocks that are in no tier; empty if there is no file."""
        offloaded = [n for n, block in found.items() if block is None and self.offload.has(n)]
        self.offload.pin(offloaded)  # allocating may evict other blocks into their places
        allocated = iter(self.pool.allocate(fresh))
        blocks, read = [], BlockFile(file, [], [])
        for place, (block_hash, block) in enumerate(found.items()):
            if block is None:
                block = next(allocated)
                if self.offload.has(block_hash):
                    self.offload.load(block_hash, block)
                else:
                    read.places.append(place)
                    read.block_ids.append(block)
                self.pool.cache_block(block, block_hash)
            blocks.append(block)
        self.offload.unpin()
        if file:  # even if nothing in it is needed: the reader removes it
            self._imports.append(read)
        return [*blocks, *allocated]

    def _count_lookup(self, request: Request) -> None:
        """Counts a prefix cache lookup. Requests that restart, here or from another engine, or
        whose prompt another engine computed, are not counted: their hits do not show how much
        requests share."""
        core = request.core
        looked_up = self.prefix_caching and not core.skip_prefix_cache
        is_first = not request.num_preemptions and not core.output_token_ids
        if looked_up and is_first and not core.handed_over:
            self.num_queried_tokens += request.prompt_tokens
            self.num_hit_tokens += request.computed

    def _register_in_flight(self, request: Request) -> None:
        """Registers the following blocks, whose tokens `request` knows, as computed by it."""
        for block_hash in request.block_hashes[request.num_cached_blocks :]:
            other = self._in_flight_blocks.setdefault(block_hash, request)
            if request.order < other.order:
                self._in_flight_blocks[block_hash] = request

    def _unregister_in_flight(self, block_hash: bytes, request: Request) -> None:
        """Removes a block that is cached now, or will not be computed."""
        if self._in_flight_blocks.get(block_hash) is request:
            del self._in_flight_blocks[block_hash]

    def _is_in_flight(self, block_hash: bytes, request: Request) -> bool:
        """Whether a request ahead of `request` computes the block."""
        leader = self._in_flight_blocks.get(block_hash)
        return leader is not None and leader.order < request.order

    def _reusable_hashes(self, request: Request) -> list[bytes]:
        """Returns the hashes of the blocks that `request` may share."""
        if not self.prefix_caching:
            return []
        self._extend_hashes(request)
        if request.core.skip_prefix_cache:
            return []
        return request.block_hashes[: (len(request.token_ids) - 1) // self.block_tokens]

    def _set_num_cached_blocks(self, request: Request, blocks: int) -> None:
        request.num_cached_blocks = blocks
        next_tokens = (blocks + 1) * self.block_tokens
        request.cacheable_tokens = next_tokens if self.prefix_caching else sys.maxsize

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def _extend_hashes(self, request: Request) -> None:
        extend_block_hashes(
            request.block_hashes, request.token_ids, self.block_tokens, request.core.cache_salt
        )
