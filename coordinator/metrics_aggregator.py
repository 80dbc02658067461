"""What the ingresses have counted, so that each of them can tell the sum: pure.

Ingresses share a port, and the kernel decides which one is asked for `/metrics`. Counts of those
that are gone are kept: a sum that shrinks would look like a restart.
"""

from __future__ import annotations

from swell.coordinator.listening_clock import ListeningClock
from swell.coordinator.wire import Counts

_EXPIRY_S = 3600.0
"""Ray Serve has replaced an ingress that was silent much less long: it will not speak again."""


def add(one: Counts, other: Counts) -> Counts:
    """Number by number; what only one has stays."""
    sums = {name: [*numbers] for name, numbers in one.items()}
    for name, numbers in other.items():
        mine = sums.get(name, [0.0] * len(numbers))
        sums[name] = [a + b for a, b in zip(mine, numbers, strict=True)]
    return sums


class MetricsAggregator:
    def __init__(self) -> None:
        self._newest: dict[int, tuple[float, Counts]] = {}
        """By `client_index`: when it spoke last, and what it told. Who spoke last is at the end."""
        self._clock = ListeningClock(_EXPIRY_S)
        self._expired: Counts = {}

    def record(self, client_index: int, counts: Counts, now: float) -> None:
        """The newest word of an ingress takes the place of all earlier ones."""
        now = self._clock.advance(now)
        self._newest.pop(client_index, None)
        self._newest[client_index] = (now, counts)
        silent, (spoke, told) = next(iter(self._newest.items()))
        if now - spoke > _EXPIRY_S:
            del self._newest[silent]
            self._expired = add(self._expired, told)

    def total_of_others(self, client_index: int) -> Counts:
        """The sum without what this ingress itself has told."""
        total = self._expired
        for index, (_, counts) in self._newest.items():
            if index != client_index:
                total = add(total, counts)
        return total
