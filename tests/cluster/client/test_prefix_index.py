"""What is found in the index is what engines hold, of chains of which each holds a beginning."""

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
    """Each change lets an engine hold so many blocks of the chain."""
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
