"""Every block is either held or free; the least recently used hash is evicted first, and hashes of
sessions last."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from swell.engine.kv.block_hash import extend_block_hashes, pack_tokens
from swell.engine.kv.block_pool import BlockPool
from tests.engine.conservation import cached_run

NUM_BLOCKS, MAX_KEPT = 6, 2
NAMES = [bytes([i]) for i in range(4)]


class PoolAgainstModel(RuleBasedStateMachine):
    """The reference model: holders of each block, a plain list of the free blocks in order of use,
    and a list of the kept ones.

    Each of `holders` stands for a request, which holds its blocks once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, max_kept=MAX_KEPT)
        self.kept: list[int] = []
        self.of_sessions: set[int] = set()
        self.free = list(range(NUM_BLOCKS))
        self.names: dict[int, bytes] = {}
        self.holders: list[list[int]] = []

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        waiting = self.free + self.kept
        if count > len(waiting):
            with pytest.raises(AssertionError, match=f"{count} blocks requested"):
                self.pool.allocate(count)
            return
        expected = waiting[:count]
        self.hold(expected)
        for block in expected:
            self.names.pop(block, None)
        self.of_sessions -= {*expected}
        assert self.pool.allocate(count) == expected
        self.holders.append(expected)

    @rule(chain=st.permutations(NAMES), length=st.integers(0, 4))
    def find_and_hold(self, chain: list[bytes], length: int) -> None:
        expected = []
        for name in chain[:length]:
            block = next((b for b, known in self.names.items() if known == name), None)
            if block is None:
                break
            expected.append(block)
        found = cached_run(self.pool, chain[:length])
        assert found == expected
        waiting = self.free + self.kept
        assert self.pool.num_free_among(found) == len([b for b in found if b in waiting])
        self.pool.touch(found)
        self.hold(found)
        self.holders.append(found)

    def hold(self, blocks: list[int]) -> None:
        self.free = [block for block in self.free if block not in blocks]
        self.kept = [block for block in self.kept if block not in blocks]

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def cache_a_held_block(self, data: st.DataObject, name: bytes) -> None:
        held = sorted({block for blocks in self.holders for block in blocks})
        if held:
            block = data.draw(st.sampled_from(held))
            self.pool.cache_block(block, name)
            if block not in self.names and name not in self.names.values():
                self.names[block] = name

    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        if not self.holders:
            return
        blocks = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.free(blocks, keep=keep)
        for block in reversed(blocks):
            if keep and block in self.names:
                self.of_sessions.add(block)
            if any(block in others for others in self.holders):
                continue
            if block not in self.names:
                self.free.insert(0, block)
            else:
                (self.kept if block in self.of_sessions else self.free).append(block)
        while len(self.kept) > MAX_KEPT:
            self.of_sessions.remove(self.kept[0])
            self.free.append(self.kept.pop(0))

    @rule(name=st.sampled_from(NAMES))
    def evict(self, name: bytes) -> None:
        self.pool.evict_hashes([name])
        block = next((b for b, known in self.names.items() if known == name), None)
        if block is not None:
            del self.names[block]
            self.of_sessions.discard(block)
        if block in self.kept:
            self.kept.remove(block)
            self.free.insert(0, block)

    @rule()
    def forget(self) -> None:
        self.pool.reset_prefix_cache()
        self.names.clear()
        self.free, self.kept = self.free + self.kept, []
        self.of_sessions.clear()

    @invariant()
    def every_block_is_held_or_free(self) -> None:
        held = {block for blocks in self.holders for block in blocks}
        waiting = self.free + self.kept
        assert sorted([*held, *waiting]) == list(range(NUM_BLOCKS))
        assert self.pool.num_free == len(waiting)

    @invariant()
    def pool_is_idle_when_no_block_is_held(self) -> None:
        if any(self.holders):
            with pytest.raises(AssertionError, match="leaked"):
                self.pool.check_idle()
        else:
            self.pool.check_idle()


PoolAgainstModel.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None
)
TestPoolAgainstModel = PoolAgainstModel.TestCase


def test_the_least_recently_used_prefix_is_evicted_first_from_its_end() -> None:
    pool = BlockPool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    for block, name in zip(old + new, NAMES, strict=True):
        pool.cache_block(block, name)
    pool.free(old)
    pool.free(new)
    assert pool.allocate(1) == [old[1]]
    assert cached_run(pool, NAMES[:2]) == [old[0]] and cached_run(pool, NAMES[2:]) == new
    assert pool.allocate(2) == [old[0], new[1]]
    assert cached_run(pool, NAMES[:2]) == [] and cached_run(pool, NAMES[2:]) == [new[0]]


def test_a_prefix_that_is_used_again_becomes_the_most_recent() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.cache_block(first[0], b"a")
    pool.cache_block(second[0], b"b")
    pool.free(first)
    pool.free(second)
    pool.touch(cached_run(pool, [b"a"]))
    pool.free(first)
    assert pool.allocate(1) == second


def test_blocks_without_a_hash_are_allocated_before_a_prefix_is_evicted() -> None:
    pool = BlockPool(3)
    named, plain = pool.allocate(1), pool.allocate(2)
    pool.cache_block(named[0], b"a")
    pool.free(named)
    pool.free(plain)
    assert sorted(pool.allocate(2)) == sorted(plain)
    assert cached_run(pool, [b"a"]) == named


def test_kept_blocks_are_evicted_after_all_others() -> None:
    pool = BlockPool(4, max_kept=2)
    session, others = pool.allocate(2), pool.allocate(2)
    for block, name in zip(session + others, NAMES, strict=True):
        pool.cache_block(block, name)
    pool.free(session, keep=True)
    pool.free(others)
    assert pool.allocate(2) == others[::-1]
    assert cached_run(pool, NAMES[:2]) == session
    assert pool.allocate(2) == session[::-1]


def test_kept_blocks_stay_kept_when_others_use_them() -> None:
    """Blocks that a session keeps stay kept when other requests use them. Without this prefix, the
    rest of the session's blocks is of no use."""
    pool = BlockPool(4, max_kept=2)
    session, others = pool.allocate(2), pool.allocate(2)
    for block, name in zip(session + others, NAMES, strict=True):
        pool.cache_block(block, name)
    pool.free(session, keep=True)
    pool.touch(session[:1])
    pool.free(session[:1])
    pool.free(others)
    assert sorted(pool.allocate(2)) == sorted(others)
    assert cached_run(pool, NAMES[:2]) == session


def test_kept_blocks_beyond_the_limit_are_evicted_like_others() -> None:
    pool = BlockPool(4, max_kept=2)
    old, new = pool.allocate(2), pool.allocate(2)
    for block, name in zip(old + new, NAMES, strict=True):
        pool.cache_block(block, name)
    pool.free(old, keep=True)
    pool.free(new, keep=True)
    assert pool.allocate(2) == old[::-1]
    assert cached_run(pool, NAMES[2:]) == new


# -------------------------------------------------------------------------------- hashes

tokens = st.lists(st.integers(0, 2), max_size=24).map(pack_tokens)


@given(tokens, tokens, st.integers(1, 5))
def test_hashes_are_equal_exactly_as_far_as_the_tokens_are(first, second, block_tokens) -> None:
    names: tuple[list[bytes], list[bytes]] = ([], [])
    for hashes, ids in zip(names, (first, second), strict=True):
        extend_block_hashes(hashes, ids, block_tokens)
        assert len(hashes) == len(ids) // block_tokens
    for index in range(min(map(len, names))):
        end = (index + 1) * block_tokens
        assert (names[0][index] == names[1][index]) == (first[:end] == second[:end])


@given(tokens, st.integers(0, 24), st.integers(1, 5), st.sampled_from([None, "a"]))
def test_hashes_can_be_extended_incrementally(ids, cut, block_tokens, salt) -> None:
    whole: list[bytes] = []
    pieces: list[bytes] = []
    extend_block_hashes(whole, ids, block_tokens, salt)
    extend_block_hashes(pieces, ids[:cut], block_tokens, salt)
    extend_block_hashes(pieces, ids, block_tokens, salt)
    extend_block_hashes(pieces, ids, block_tokens, salt)
    assert pieces == whole


def test_a_salt_separates_every_block() -> None:
    named = []
    for salt in (None, "a", "b"):
        named.append([])
        extend_block_hashes(named[-1], pack_tokens([1, 2, 3, 4]), 2, salt)
    assert len({name for names in named for name in names}) == 6
