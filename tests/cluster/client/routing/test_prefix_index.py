"""Prompts with a common prefix have equal block hashes there, and other prompts have different
ones. The index finds the prefixes of block chains that engines hold. Each engine holds a prefix of
a chain."""

from __future__ import annotations

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from swell.cluster.client.routing.prefix_index import PrefixIndex, PromptBlocks
from swell.engine.kv.block_hash import extend_block_hashes, pack_tokens

BLOCK = 3
PROMPTS = st.lists(st.integers(0, 1), max_size=4 * BLOCK)
SALTS = st.sampled_from([None, "a", "b"])
CHAIN = [*range(100, 112)]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=20),
    st.sets(st.integers(0, 4)),
)
def test_the_longest_held_prefix_is_found(changes, ranks) -> None:
    """Each change sets how many blocks of the chain an engine holds."""
    index, held = PrefixIndex(), dict.fromkeys(range(5), 0)
    for rank, length in changes:
        for name in CHAIN[held[rank] : length]:
            index.add(name, rank)
            index.add(name, rank)
        for name in CHAIN[length : held[rank]]:
            index.discard(name, rank)
            index.discard(name, rank)
        held[rank] = length
    assert len(index) == max(held.values())
    for number, name in enumerate(CHAIN):
        assert set(index.holders(name)) == {r for r, n in held.items() if n > number}
    assert index.longest(CHAIN, frozenset(ranks)) == max((held[r] for r in ranks), default=0)
    assert index.longest([], frozenset(ranks)) == 0


def hashes_of(prompt: list[int], salt: str | None) -> list[bytes]:
    """The oracle: the block hashes that engines compute."""
    hashes: list[bytes] = []
    extend_block_hashes(hashes, pack_tokens(prompt), BLOCK, salt)
    return hashes


@given(PROMPTS, SALTS, PROMPTS, SALTS)
def test_names_and_digests_agree_with_those_of_engines(
    first: list[int], first_salt: str | None, second: list[int], second_salt: str | None
) -> None:
    ours = PromptBlocks(first, BLOCK, first_salt), PromptBlocks(second, BLOCK, second_salt)
    theirs = hashes_of(first, first_salt), hashes_of(second, second_salt)
    assert [len(blocks.names) for blocks in ours] == [*map(len, theirs)]
    for count, (one, other) in enumerate(zip(*theirs, strict=False)):
        is_equal = one == other
        assert (ours[0].names[count] == ours[1].names[count]) == is_equal
        assert (ours[0].digest(count + 1) == ours[1].digest(count + 1)) == is_equal


def test_a_digest_is_the_same_in_each_process() -> None:
    """All ingresses therefore choose the same engine."""
    code = (
        "from swell.cluster.client.routing.prefix_index import PromptBlocks\n"
        "blocks = PromptBlocks(range(50), 16, 'salt')\n"
        "print(blocks.digest(2).hex(), blocks.names[1])"
    )
    answers = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for seed in ("1", "2")
    ]
    assert answers[0][0] == answers[1][0]
    assert answers[0][1] != answers[1][1], "names are of one process"
