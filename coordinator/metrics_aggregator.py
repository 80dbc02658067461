"""Aggregates the counts of all ingresses, so that each of them can expose the sums. Pure.

Ingresses share a port, and the kernel decides which one answers `/metrics`. Counts of ingresses
that are gone are kept: a sum that decreases would look like a restart.
"""

from __future__ import annotations

import operator
from itertools import accumulate

from swell.coordinator.transport.listening_clock import ListeningClock
from swell.coordinator.wire import Counts

_EXPIRY_S = 3600.0
"""An ingress that is silent for this long is gone: Ray Serve would have replaced it much
earlier."""

_SUMS_PER_ROUND, _MAX_SUMS = 8, 64
"""How often the sums are recomputed while each ingress sends its counts once; with many ingresses
less often, to limit the number of sums."""


def add(one: Counts, other: Counts) -> Counts:
    """Adds two sets of counts, number by number; a metric may be in only one of them."""
    if not one or not other:
        return one or other
    sums = {name: [*numbers] for name, numbers in one.items()}
    for name, numbers in other.items():
        mine = sums.get(name)
        sums[name] = [*numbers] if mine is None else list(map(operator.add, mine, numbers))
    return sums


def highest(one: Counts, other: Counts) -> Counts:
    """Returns the larger of both, number by number; a metric may be in only one of them."""
    numbers = {name: list(map(max, one[name], other[name])) for name in one.keys() & other.keys()}
    return {**one, **other, **numbers}


class MetricsAggregator:
    """Keeps the newest counts of each ingress and their sums. The sums for all ingresses are
    computed together, in the order of their indices: this takes three additions per ingress, and
    rounding cannot make a sum decrease."""

    def __init__(self) -> None:
        self._totals: dict[int, Counts] = {}
        """`client_index` -> sum over all other ingresses."""
        self._unsummed = 0
        """Number of changed counts that arrived after these sums."""
        self._newest: dict[int, tuple[float, Counts]] = {}
        """`client_index` -> (arrival, newest counts). The latest arrivals are at the end."""
        self._clock = ListeningClock(_EXPIRY_S)
        self._expired: Counts = {}

    def record(self, client_index: int, counts: Counts, now: float) -> None:
        """Replaces the earlier counts of an ingress."""
        now = self._clock.advance(now)
        before = self._newest.pop(client_index, None)
        self._unsummed += before is None or before[1] != counts
        self._newest[client_index] = (now, counts)
        silent, (recorded_at, last) = next(iter(self._newest.items()))
        if now - recorded_at > _EXPIRY_S:
            del self._newest[silent]
            self._expired = add(self._expired, last)
            self._totals = {}

    def total_of_others(self, client_index: int) -> Counts:
        """Returns the sum over all other ingresses, also those that are gone."""
        times = max(1, min(_SUMS_PER_ROUND, _MAX_SUMS // max(1, len(self._newest))))
        is_old = self._unsummed * times >= len(self._newest)
        if is_old or client_index not in self._totals:
            self._unsummed = 0
            self._totals = self._sum_others()
        return self._totals.get(client_index, self._expired)

    def total(self, name: str) -> list[float]:
        """Returns the sum of one metric over all ingresses, also those that are gone."""
        parts = (counts for _, counts in self._newest.values())
        found = [counts[name] for counts in (self._expired, *parts) if name in counts]
        return [sum(numbers) for numbers in zip(*found, strict=True)]

    def _sum_others(self) -> dict[int, Counts]:
        indices = sorted(self._newest)
        counts = [self._newest[index][1] for index in indices]
        before = accumulate(counts, add, initial=self._expired)
        after = [*accumulate(reversed(counts), add, initial=Counts())][-2::-1]
        return {
            index: add(lower, upper)
            for index, lower, upper in zip(indices, before, after, strict=False)
        }
