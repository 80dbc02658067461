"""Back-off of starts: when the next engine of a rank may start, and why engines are missing. Pure.

The first replacement starts at once. Each further attempt waits twice as long as the one before, up
to five minutes; a rank is retried without end. An engine that served for a while shows that engines
can run here, so earlier failures are forgotten. After several early deaths in a row, or several
failed starts in a row, the rank is *exhausted*: an operator must find the cause.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace

MAX_FAILURES = 5
"""Failed starts in a row after which a rank is exhausted."""
MAX_DEATHS = 5
"""Early deaths in a row that do not exhaust a rank yet; one more does."""
EARLY_DEATH_S = 30.0
"""An engine that served for less than this died early."""
_FIRST_S = 0.5
_LONGEST_S = 300.0
_DOUBLINGS = 20
"""Limit of the exponent: enough to reach `_LONGEST_S`, and far below the overflow of a float."""
TICK_S = 1e-3
"""Shorter waits count as zero: they are below the resolution of clocks."""


def delay_s(failures: int) -> float:
    """Returns the delay before the next attempt after `failures` failures in a row; 0 for the first
    retry."""
    if failures < 2:
        return 0.0
    return min(_FIRST_S * 2.0 ** min(failures - 2, _DOUBLINGS), _LONGEST_S)


@dataclass(frozen=True)
class _Slot:
    """History of the engines of one rank."""

    failures: int = 0
    """Failed starts since the last successful one."""
    deaths: int = 0
    """Early deaths since an engine served for at least `EARLY_DEATH_S`."""
    not_before: float = 0.0
    reason: str = ""
    """Reason of the last failure or death."""

    @property
    def exhausted(self) -> bool:
        return self.failures >= MAX_FAILURES or self.deaths > MAX_DEATHS

    def delayed(self, now: float) -> _Slot:
        return replace(self, not_before=now + delay_s(self.failures + self.deaths))


@dataclass(frozen=True)
class MissingEngine:
    """Why the engine of a rank is missing."""

    rank: int
    reason: str
    times: int
    """Failed starts in a row, or early deaths in a row."""
    next_try_s: float
    """Seconds until the next attempt; 0: an attempt is running."""
    exhausted: bool
    """The rank failed so often that an operator must find the cause."""
    dying: bool
    """Starts succeed, but the engines die soon."""

    def __str__(self) -> str:
        if not self.exhausted:
            return self.reason
        again = f"in {self.next_try_s:.0f} s" if self.next_try_s else "now"
        if self.dying:
            return (
                f"engine {self.rank} has died {self.times} times in a row, last because: "
                f"{self.reason}; it is restarted {again}"
            )
        return f"{self.reason} (tried {self.times} times; next try {again})"


@dataclass(frozen=True)
class Backoff:
    """Back-off state of all ranks. Each event returns a new value. A new `Backoff` is without
    failures."""

    slots: Mapping[int, _Slot] = field(default_factory=dict)

    def died(self, rank: int, lived_s: float, now: float, reason: str = "") -> Backoff:
        """Records that an engine died after it had served for `lived_s`."""
        slot = self._slot(rank)
        if lived_s >= EARLY_DEATH_S:
            slot = replace(slot, failures=0, deaths=0, reason=reason)
        else:
            slot = replace(slot, deaths=slot.deaths + 1, reason=reason)
        return self._with(rank, slot.delayed(now))

    def failed(
        self, rank: int, now: float, reason: str = "", *, permanent: bool = False
    ) -> Backoff:
        """Records a failed start. `permanent`: a retry at once would fail too, so the rank is
        exhausted."""
        slot = self._slot(rank)
        failures = max(slot.failures + 1, MAX_FAILURES if permanent else 0)
        return self._with(rank, replace(slot, failures=failures, reason=reason).delayed(now))

    def started(self, rank: int) -> Backoff:
        """Records a successful start."""
        if rank not in self.slots:
            return self
        return self._with(rank, replace(self.slots[rank], failures=0))

    def wait_s(self, rank: int, now: float) -> float:
        """Returns the seconds until the rank may be tried again."""
        left_s = self._slot(rank).not_before - now
        return left_s if left_s > TICK_S else 0.0

    def failures(self, rank: int) -> int:
        """Returns the number of failed starts since the last successful one."""
        return self._slot(rank).failures

    def exhausted(self, rank: int) -> bool:
        """Whether the rank failed so often that an operator must find the cause."""
        return self._slot(rank).exhausted

    def worst_missing_engine(self, living: Container[int], now: float) -> MissingEngine | None:
        """Returns why the worst rank without a living engine has none. A rank with only a few early
        deaths does not count."""
        absent = [
            rank
            for rank, slot in self.slots.items()
            if rank not in living and (slot.failures or slot.exhausted)
        ]
        if not absent:
            return None
        rank = max(absent, key=lambda r: (self.slots[r].exhausted, self.slots[r].not_before))
        return self._reason_of(rank, now)

    def missing_engine(self, rank: int, now: float) -> MissingEngine | None:
        """Returns why the engine of a rank is missing; None: the last start of this rank succeeded,
        or it was never started."""
        return self._reason_of(rank, now) if self._slot(rank).failures else None

    def _reason_of(self, rank: int, now: float) -> MissingEngine:
        slot = self.slots[rank]
        return MissingEngine(
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
