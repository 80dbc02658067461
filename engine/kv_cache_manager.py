"""Gives blocks to requests and finds prefixes that were computed before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from swell.configs.schema import CacheConfig
from swell.engine.block_hash import extend_block_hashes
from swell.engine.block_pool import BlockPool
from swell.engine.offload_tiers import OffloadTiers
from swell.engine.request import HandoverState, Request
from swell.worker.wire import BlockFile


class PrefixLeader(NamedTuple):
    """What a waiting request follows: a prefix of its own that requests ahead of it compute."""

    name: bytes
    """The hash of the last block of that prefix."""
    own_blocks: int
    """Blocks that the follower needs behind the prefix."""


class KVCacheManager:
    """Blocks of requests over a `BlockPool`.

    Blocks may be named (made findable) as soon as the step that fills them is scheduled: any
    step that reads them runs after it. Until then the name of a block that a running request
    holds for a token it knows is *promised*: it is named as that request goes on, or withdrawn
    when it lets go of its blocks.
    """

    def __init__(
        self, config: CacheConfig, num_blocks: int, offload_blocks: Sequence[int] = ()
    ) -> None:
        """`offload_blocks`: the sizes of the tiers below the device."""
        self.block_tokens = config.block_tokens
        self.prefix_caching = config.prefix_caching
        self.offload = OffloadTiers(offload_blocks)
        max_kept = int(config.session_fraction * num_blocks)
        self.pool = BlockPool(num_blocks, self.offload.save, max_kept)
        self.claim: Callable[[str], bool] = lambda name: False
        """Whether a file with blocks of another engine is there, and this engine's now."""
        self._imports: list[BlockFile] = []
        self._in_flight_blocks: dict[bytes, Request] = {}
        """Name -> who will give it: of several the first in order."""
        self.num_queried_tokens = 0
        """Prompt tokens that were looked up, once a request."""
        self.num_hit_tokens = 0
        """Those that were found."""

    @property
    def usage(self) -> float:
        """Share of blocks that requests hold."""
        return 1.0 - self.pool.num_free / self.pool.num_blocks

    def admit(self, request: Request, spare_blocks: int) -> bool:
        """Hold cached and fresh blocks for all tokens that `request` knows, or none.

        The last known token is always recomputed: its logits are what the request waits for.
        `spare_blocks` must stay free, for requests that already run.
        """
        names = self._reusable_hashes(request)
        found = self._find(names)
        if not self._has_room(request, found, spare_blocks):
            return False
        if self._claim(request):
            found = self._find(names, is_whole=True)
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
        """The prefix leader that `request` should wait for, if the next block that it lacks is in
        flight for a request ahead of it.

        `prefix_leader` is the result of the previous call. While that stands, a call takes one
        lookup; else one for each block of the prefix.
        """
        if prefix_leader is not None and self._is_in_flight(prefix_leader.name, request):
            return prefix_leader
        if request.handover is HandoverState.EXPECTED:
            return None
        names = self._reusable_hashes(request)
        found = shared = len(self._find(names))
        while shared < len(names) and self._is_in_flight(names[shared], request):
            shared += 1
        if shared == found:
            return None
        return PrefixLeader(names[shared - 1], self._blocks_for(len(request.token_ids)) - shared)

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Blocks added so that `num_tokens` fit; None if there are not enough."""
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
        """Make findable what is computed (or in flight) and whose tokens the host knows. There is
        nothing to do below `request.cacheable_tokens`."""
        full = min(request.computed, len(request.token_ids)) // self.block_tokens
        if full <= request.num_cached_blocks:
            return
        self._extend_hashes(request)
        for index in range(request.num_cached_blocks, full):
            self.pool.cache_block(request.block_ids[index], request.block_hashes[index])
            self._unregister_in_flight(request.block_hashes[index], request)
        self._set_num_cached_blocks(request, full)

    def free(self, request: Request) -> None:
        for name in request.block_hashes[request.num_cached_blocks :]:
            self._unregister_in_flight(name, request)
        self.pool.free(request.block_ids, keep=request.core.keep_blocks)
        request.block_ids = []
        request.block_capacity_tokens = request.num_cached_blocks = 0

    def evict_computed(self, request: Request) -> None:
        """Remove what `request` has computed from the prefix cache: it is invalid. By hash, because
        the request may have been preempted since, and have freed its blocks."""
        self.pool.evict_hashes(request.block_hashes)
        self.offload.forget(request.block_hashes)

    def reset_prefix_cache(self) -> None:
        """Find no prefix that was computed before: its content may be lost. No block is in use."""
        self.check_idle()
        self.pool.reset_prefix_cache()
        self.offload.reset()
        self._imports.clear()

    def check_idle(self) -> None:
        """Raise AssertionError unless every block is free and none is in flight."""
        self.pool.check_idle()
        num_blocks = len(self._in_flight_blocks)
        assert not num_blocks, f"{num_blocks} blocks are in flight without a request"

    def exported(self, request: Request) -> BlockFile:
        """All blocks of a request whose prompt fills them."""
        blocks = request.block_ids[: request.prompt_tokens // self.block_tokens]
        return BlockFile(request.core.hand_over, list(range(len(blocks))), blocks)

    def take_imports(self) -> list[BlockFile]:
        """Blocks that the next step reads from files."""
        imports, self._imports = self._imports, []
        return imports

    def _has_room(
        self, request: Request, found: dict[bytes, int | None], spare_blocks: int
    ) -> bool:
        cached = [block for block in found.values() if block is not None]
        fresh = self._blocks_for(len(request.token_ids)) - len(cached)
        return fresh + self.pool.num_free_among(cached) + spare_blocks <= self.pool.num_free

    def _claim(self, request: Request) -> bool:
        """Look once whether another engine has computed its prompt, when it begins. What that gave
        is read once: a request that is preempted starts again without."""
        if request.handover is HandoverState.EXPECTED and self.prefix_caching:
            is_there = self.claim(request.core.handed_over)
            request.handover = HandoverState.READ if is_there else HandoverState.NONE
            return is_there
        return False

    def _find(self, names: list[bytes], *, is_whole: bool = False) -> dict[bytes, int | None]:
        """The longest run of blocks that exist for a chain of names: the device's block of each;
        None: it is in a tier below, or, if all of them are there in any case, in a file."""
        found: dict[bytes, int | None] = {}
        for name in names:
            block = self.pool.get_cached_block(name)
            if block is None and not is_whole and not self.offload.has(name):
                break
            found[name] = block
        return found

    def _hold(self, found: dict[bytes, int | None], fresh: int, file: str) -> list[int]:
        """Blocks of a request: those that were found, copied to the device where they are not
        there, and behind them what is new. `fresh`: how many have to be allocated for that; `file`:
        where those are that are in no tier; empty: there are none."""
        offloaded = [n for n, block in found.items() if block is None and self.offload.has(n)]
        self.offload.pin(offloaded)  # allocating may push others into their places
        allocated = iter(self.pool.allocate(fresh))
        blocks, read = [], BlockFile(file, [], [])
        for place, (name, block) in enumerate(found.items()):
            if block is None:
                block = next(allocated)
                if self.offload.has(name):
                    self.offload.load(name, block)
                else:
                    read.places.append(place)
                    read.block_ids.append(block)
                self.pool.cache_block(block, name)
            blocks.append(block)
        self.offload.unpin()
        if file:  # also if nothing of it is needed: its reader removes it
            self._imports.append(read)
        return [*blocks, *allocated]

    def _count_lookup(self, request: Request) -> None:
        """A request that starts again, here or from another engine, or whose prompt that computed,
        finds its own blocks or none: that says nothing of how much requests share."""
        core = request.core
        looked_up = self.prefix_caching and not core.skip_prefix_cache
        is_first = not request.num_preemptions and not core.output_token_ids
        if looked_up and is_first and not core.handed_over:
            self.num_queried_tokens += request.prompt_tokens
            self.num_hit_tokens += request.computed

    def _register_in_flight(self, request: Request) -> None:
        """`request` computes every block from here on of which it knows all tokens."""
        for name in request.block_hashes[request.num_cached_blocks :]:
            other = self._in_flight_blocks.setdefault(name, request)
            if request.order < other.order:
                self._in_flight_blocks[name] = request

    def _unregister_in_flight(self, name: bytes, request: Request) -> None:
        """The block is cached now, or will not be."""
        if self._in_flight_blocks.get(name) is request:
            del self._in_flight_blocks[name]

    def _is_in_flight(self, name: bytes, request: Request) -> bool:
        """Whether a request ahead of `request` computes the block."""
        leader = self._in_flight_blocks.get(name)
        return leader is not None and leader.order < request.order

    def _reusable_hashes(self, request: Request) -> list[bytes]:
        """Names of the blocks that `request` may take from others."""
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
