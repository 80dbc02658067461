"""Counts of all ingresses, so that each of them can expose the sum: pure.

Ingresses share a port, and the kernel decides which one answers `/metrics`. Counts of ingresses
that are gone are kept: a sum that shrinks would look like a restart.
"""

from __future__ import annotations

from swell.coordinator.listening_clock import ListeningClock
from swell.coordinator.wire import Counts

_EXPIRY_S = 3600.0
"""Ray Serve replaces an ingress that is silent much sooner: this one is gone."""


def add(one: Counts, other: Counts) -> Counts:
    """The sum, number by number; a metric may be in one of them only."""
    sums = {name: [*numbers] for name, numbers in one.items()}
    for name, numbers in other.items():
        mine = sums.get(name, [0.0] * len(numbers))
        sums[name] = [a + b for a, b in zip(mine, numbers, strict=True)]
    return sums


class MetricsAggregator:
    def __init__(self) -> None:
        self._newest: dict[int, tuple[float, Counts]] = {}
        """By `client_index`: when its last counts came, and these. The newest are at the end."""
        self._clock = ListeningClock(_EXPIRY_S)
        self._expired: Counts = {}

    def record(self, client_index: int, counts: Counts, now: float) -> None:
        """The newest counts of an ingress replace its earlier ones."""
        now = self._clock.advance(now)
        self._newest.pop(client_index, None)
        self._newest[client_index] = (now, counts)
        silent, (recorded_at, last) = next(iter(self._newest.items()))
        if now - recorded_at > _EXPIRY_S:
            del self._newest[silent]
            self._expired = add(self._expired, last)

    def total_of_others(self, client_index: int) -> Counts:
        """The sum over all other ingresses, also those that are gone."""
        total = self._expired
        for index, (_, counts) in self._newest.items():
            if index != client_index:
                total = add(total, counts)
        return total
