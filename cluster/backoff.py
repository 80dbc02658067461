"""When a rank's next engine may be started, and when there is no sense in starting more. Pure.

The first replacement starts at once, and each further attempt waits twice as long as the one
before it. An engine that lived for a while shows that engines can live here: what happened before
it is forgotten. Several deaths of young engines in a short time, or several starts in a row that
failed, are enough: somebody has to look.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_FAILURES = 5
"""Starts in a row that may fail."""
MAX_DEATHS = 5
"""Young engines that may die within the window."""
WINDOW_S = 120.0
YOUNG_S = 30.0
"""An engine that served for less than this died young."""
_FIRST_S = 0.5
_LONGEST_S = 10.0
_TICK_S = 1e-3
"""Less than a clock tells apart is no wait."""


@dataclass
class _Slot:
    """What happened to the engines of one rank."""

    failures: int = 0
    deaths: list[float] = field(default_factory=list)
    """When young engines died."""
    not_before: float = 0.0

    def delay(self, now: float) -> None:
        troubles = self.failures + len(self.deaths)
        wait_s = min(_FIRST_S * 2.0 ** (troubles - 2), _LONGEST_S) if troubles > 1 else 0.0
        self.not_before = now + wait_s


class Backoff:
    """The troubles of each rank of a cluster."""

    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}

    def died(self, rank: int, lived_s: float, now: float) -> None:
        """An engine died after it had served for `lived_s`."""
        slot = self._slots.setdefault(rank, _Slot())
        young = lived_s < YOUNG_S
        slot.deaths = [*self._recent(slot, now), now] if young else []
        slot.delay(now)

    def failed(self, rank: int, now: float) -> None:
        """A start did not succeed."""
        slot = self._slots.setdefault(rank, _Slot())
        slot.failures += 1
        slot.deaths = self._recent(slot, now)
        slot.delay(now)

    def started(self, rank: int) -> None:
        """A start succeeded."""
        if rank in self._slots:
            self._slots[rank].failures = 0

    def forget(self) -> None:
        """Somebody has looked."""
        self._slots.clear()

    def wait_s(self, rank: int, now: float) -> float:
        """Seconds until the rank may be tried again."""
        slot = self._slots.get(rank)
        left_s = slot.not_before - now if slot else 0.0
        return left_s if left_s > _TICK_S else 0.0

    def exhausted(self, rank: int, now: float) -> bool:
        """Whether the rank was tried often enough."""
        slot = self._slots.get(rank)
        return slot is not None and (
            slot.failures >= MAX_FAILURES or len(self._recent(slot, now)) > MAX_DEATHS
        )

    @staticmethod
    def _recent(slot: _Slot, now: float) -> list[float]:
        return [at for at in slot.deaths if now - at <= WINDOW_S]
