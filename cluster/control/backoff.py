"""When a rank's next engine may be started, and why engines of it are missing. Pure.

The first replacement starts at once, and each further attempt waits twice as long as the one
before it, up to some minutes; a rank is always tried again. An engine that served for a while shows
that engines can run here: what happened before it is forgotten. After several deaths of young
engines in a row, or several starts in a row that failed, the rank is *exhausted*: an operator has
to find the cause.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace

MAX_FAILURES = 5
"""Starts in a row that fail until the rank is exhausted."""
MAX_DEATHS = 5
"""Young engines in a row that may die until the rank is exhausted."""
YOUNG_S = 30.0
"""An engine that served for less than this died young."""
_FIRST_S = 0.5
_LONGEST_S = 300.0
_DOUBLINGS = 20
"""More than `_LONGEST_S` needs; fewer than a float can hold."""
TICK_S = 1e-3
"""Waits below the resolution of clocks are none."""


def delay_s(failures: int) -> float:
    """Before the next attempt, after so many in a row have failed: the first is made at once."""
    if failures < 2:
        return 0.0
    return min(_FIRST_S * 2.0 ** min(failures - 2, _DOUBLINGS), _LONGEST_S)


@dataclass(frozen=True)
class _Slot:
    """What happened to the engines of one rank."""

    failures: int = 0
    """Starts that failed since one succeeded."""
    deaths: int = 0
    """Engines that died young since one did not."""
    not_before: float = 0.0
    reason: str = ""
    """Of the last trouble."""

    @property
    def exhausted(self) -> bool:
        return self.failures >= MAX_FAILURES or self.deaths > MAX_DEATHS

    def delayed(self, now: float) -> _Slot:
        return replace(self, not_before=now + delay_s(self.failures + self.deaths))


@dataclass(frozen=True)
class Trouble:
    """Why a rank has no engine."""

    rank: int
    reason: str
    times: int
    """Starts in a row that failed, or engines that died."""
    next_try_s: float
    """Until it is tried again; 0: it is being tried."""
    exhausted: bool
    """It was tried so often that an operator has to find the cause."""
    dying: bool
    """Starts succeed, and engines die soon."""

    def __str__(self) -> str:
        if not self.exhausted:
            return self.reason
        again = f"in {self.next_try_s:.0f} s" if self.next_try_s else "now"
        if self.dying:
            return (
                f"engine {self.rank} dies again and again ({self.times} times), the last time "
                f"because: {self.reason}; it is started again {again}"
            )
        return f"{self.reason} (tried {self.times} times; tried again {again})"


@dataclass(frozen=True)
class Backoff:
    """The troubles of every rank. Each event gives the next value; a new one has no trouble."""

    slots: Mapping[int, _Slot] = field(default_factory=dict)

    def died(self, rank: int, lived_s: float, now: float, reason: str = "") -> Backoff:
        """An engine died after it had served for `lived_s`."""
        slot = self._slot(rank)
        if lived_s >= YOUNG_S:
            slot = replace(slot, failures=0, deaths=0, reason=reason)
        else:
            slot = replace(slot, deaths=slot.deaths + 1, reason=reason)
        return self._with(rank, slot.delayed(now))

    def failed(
        self, rank: int, now: float, reason: str = "", *, permanent: bool = False
    ) -> Backoff:
        """A start did not succeed. `permanent`: it would not, if it were tried at once."""
        slot = self._slot(rank)
        failures = max(slot.failures + 1, MAX_FAILURES if permanent else 0)
        return self._with(rank, replace(slot, failures=failures, reason=reason).delayed(now))

    def started(self, rank: int) -> Backoff:
        """A start succeeded."""
        if rank not in self.slots:
            return self
        return self._with(rank, replace(self.slots[rank], failures=0))

    def wait_s(self, rank: int, now: float) -> float:
        """Seconds until the rank may be tried again."""
        left_s = self._slot(rank).not_before - now
        return left_s if left_s > TICK_S else 0.0

    def failures(self, rank: int) -> int:
        """Starts that failed since one succeeded."""
        return self._slot(rank).failures

    def exhausted(self, rank: int) -> bool:
        """Whether the rank was tried so often that an operator has to find the cause."""
        return self._slot(rank).exhausted

    def trouble(self, living: Container[int], now: float) -> Trouble | None:
        """The worst of those ranks that have no living engine. A rank whose engine died a few times
        has none."""
        absent = [
            rank
            for rank, slot in self.slots.items()
            if rank not in living and (slot.failures or slot.exhausted)
        ]
        if not absent:
            return None
        rank = max(absent, key=lambda r: (self.slots[r].exhausted, self.slots[r].not_before))
        return self._trouble(rank, now)

    def trouble_of(self, rank: int, now: float) -> Trouble | None:
        """Of one rank; None: its last start succeeded, or it had none."""
        return self._trouble(rank, now) if self._slot(rank).failures else None

    def _trouble(self, rank: int, now: float) -> Trouble:
        slot = self.slots[rank]
        return Trouble(
            rank,
            slot.reason,
            slot.failures or slot.deaths,
            self.wait_s(rank, now),
            slot.exhausted,
            dying=not slot.failures,
        )

    def _slot(self, rank: int) -> _Slot:
        return self.slots.get(rank, _Slot(not_before=float("-inf")))

    def _with(self, rank: int, slot: _Slot) -> Backoff:
        return Backoff({**self.slots, rank: slot})
