"""The hash ring returns the requested number of neighbours, in the same order to everyone. Adding
or removing an engine changes few of them."""

from __future__ import annotations

from collections import Counter

from swell.cluster.client.routing.routable_engines import HashRing

KEYS = [b"key %d" % number for number in range(500)]


def test_each_key_has_the_requested_number_of_distinct_neighbours() -> None:
    ring = HashRing(range(100))
    for key in KEYS:
        found = ring.neighbours(key, 32)
        assert len(set(found)) == len(found) == 32
        assert found == HashRing(reversed(range(100))).neighbours(key, 32)
    assert sorted(ring.neighbours(b"key", 200)) == list(range(100))
    assert HashRing([]).neighbours(b"key", 3) == []


def test_every_engine_is_a_neighbour() -> None:
    ring = HashRing(range(100))
    counts = Counter(rank for key in KEYS for rank in ring.neighbours(key, 32))
    assert set(counts) == set(range(100))


def test_a_removed_engine_changes_one_neighbour() -> None:
    before, after = HashRing(range(100)), HashRing(rank for rank in range(100) if rank != 7)
    for key in KEYS:
        lost = set(before.neighbours(key, 32)) - set(after.neighbours(key, 32))
        assert lost <= {7}
