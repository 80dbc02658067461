"""The index finds the prefixes of block chains that engines hold. Each engine holds a prefix of a
chain."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swell.cluster.client.routing.prefix_index import PrefixIndex

CHAIN = [*range(100, 112)]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=20),
    st.sets(st.integers(0, 4)),
)
def test_the_longest_prefix_that_some_engine_holds(changes, ranks) -> None:
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
