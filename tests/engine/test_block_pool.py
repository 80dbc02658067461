"""Every block is either held or free; the least recently used hash is evicted first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from swell.engine.block_hash import extend_block_hashes, pack_tokens
from swell.engine.block_pool import BlockPool
from tests.engine.conservation import cached_run

NUM_BLOCKS = 6
NAMES = [bytes([i]) for i in range(4)]


class PoolAgainstModel(RuleBasedStateMachine):
    """The model: holders of each block, and a plain list of free blocks in the order of use.

    Each of `holders` stands for a request: it holds a list of blocks once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.free = list(range(NUM_BLOCKS))
        self.names: dict[int, bytes] = {}
        self.holders: list[list[int]] = []

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(AssertionError, match=f"{count} blocks wanted"):
                self.pool.allocate(count)
            return
        expected, self.free = self.free[:count], self.free[count:]
        for block in expected:
            self.names.pop(block, None)
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
        assert self.pool.num_free_among(found) == len([b for b in found if b in self.free])
        self.pool.touch(found)
        self.free = [block for block in self.free if block not in found]
        self.holders.append(found)

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def cache_a_held_block(self, data: st.DataObject, name: bytes) -> None:
        held = sorted({block for blocks in self.holders for block in blocks})
        if held:
            block = data.draw(st.sampled_from(held))
            self.pool.cache_block(block, name)
            if block not in self.names and name not in self.names.values():
                self.names[block] = name

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if not self.holders:
            return
        blocks = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.free(blocks)
        for block in reversed(blocks):
            if not any(block in others for others in self.holders):
                self.free.insert(len(self.free) if block in self.names else 0, block)

    @rule()
    def forget(self) -> None:
        self.pool.reset_prefix_cache()
        self.names.clear()

    @invariant()
    def every_block_is_held_or_free(self) -> None:
        held = {block for blocks in self.holders for block in blocks}
        assert held | set(self.free) == set(range(NUM_BLOCKS))
        assert not held & set(self.free)
        assert self.pool.num_free == len(self.free)

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
