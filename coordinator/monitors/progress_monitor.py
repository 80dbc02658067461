"""Records which subjects have reported, and which make progress. Pure: the time is an argument.

Subjects report a counter that changes with progress. A subject that is busy and whose counter does
not change is without progress; an idle subject is not. The callers decide which subjects to check,
after how long, and which one of several is the cause: for engines at the coordinator
(`engine_monitor.py`), for engines at an ingress (`cluster/client/routing/readiness.py`), for
workers at their engine (`engine/executor/worker_monitor.py`).

All durations count only time in which the caller listened (`listening_clock.py`), up to the last
`advance`: time in which it was suspended, and received nothing, does not count.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from swell.coordinator.transport.listening_clock import ListeningClock

S = TypeVar("S", bound=Hashable)


@dataclass(slots=True)
class Progress:
    """The record of one subject; times are those of a `ListeningClock`."""

    heard_at: float
    progressed_at: float
    counter: Any = None
    """The last reported value; None before the first report."""
    busy: bool = False


class ProgressMonitor(Generic[S]):
    """Keeps one record for each subject."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: the silence that the clock measures."""
        self._clock = ListeningClock(limit_s)
        self._now = 0.0
        self._subjects: dict[S, Progress] = {}

    @property
    def subjects(self) -> frozenset[S]:
        return frozenset(self._subjects)

    def is_watched(self, subject: S) -> bool:
        return subject in self._subjects

    def counter(self, subject: S) -> Any:
        return self._subjects[subject].counter

    def read(self, now: float) -> float:
        """Returns the time by the monitor's clock."""
        return self._clock.read(now)

    def advance(self, now: float) -> float:
        """Advances the clock after the caller has handled all received reports. Returns its
        time."""
        self._now = self._clock.advance(now)
        return self._now

    def set_subjects(self, subjects: Iterable[S], now: float) -> None:
        """Monitors these subjects and no others; a new one has the full time to report."""
        at = self._clock.read(now)
        self._subjects = {s: self._subjects.get(s) or Progress(at, at) for s in subjects}

    def remove(self, subject: S) -> None:
        self._subjects.pop(subject, None)

    def on_report(self, subject: S, counter: Any, now: float, busy: bool = True) -> None:
        """Records a report of a monitored subject. It counts as progress if the counter has
        changed, or if the subject was not busy at this report or the one before."""
        record = self._subjects[subject]
        at = self._clock.read(now)
        if counter != record.counter or not (busy and record.busy):
            record.progressed_at = at
        record.heard_at, record.counter, record.busy = at, counter, busy

    def excuse(self, subjects: Iterable[S]) -> None:
        """Restarts the time without progress of these subjects."""
        for subject in subjects:
            if subject in self._subjects:
                self._subjects[subject].progressed_at = self._now

    def silent_s(self, limit_s: float) -> dict[S, float]:
        """Returns subjects that have not reported for longer than the limit, and for how long."""
        now = self._now
        return {
            s: now - record.heard_at
            for s, record in self._subjects.items()
            if now - record.heard_at > limit_s
        }

    def without_progress_s(self, limit_s: float, since: float = 0.0) -> dict[S, float]:
        """Returns busy subjects without progress for longer than the limit, and for how long. Time
        before `since`, by the monitor's clock, does not count."""
        now = self._now
        return {
            s: now - max(record.progressed_at, since)
            for s, record in self._subjects.items()
            if record.busy and now - max(record.progressed_at, since) > limit_s
        }
