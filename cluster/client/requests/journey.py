"""The events of one request, on the clock of its ingress. Pure.

An engine reports durations since the attempt arrived, because it has another clock. It sends the
report when it schedules the request. So the ingress takes the arrival of the report as the time of
its last event; the error is the transfer time of the report. The remaining time, from routing to
the first reported event, is the transfer to the engine, including the time in which the engine
computed a step and read no messages:

    ingress   routed                                      report arrives
                 |                                              |
    engine       |-- transfer -------> queued ---> scheduled ---(transfer, not known)
                                        |<- reported ->|
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from swell.cluster.client.requests.stats import FinishedRequestStats
from swell.engine.wire import JourneyEvent, JourneyEventType

MAX_EVENTS = 64
"""Limit on the events of one request; a normal request has 5. Later ones are only counted, except
the finish."""


class PlacedEvent(msgspec.Struct, frozen=True, gc=False):
    """An event with its time."""

    kind: JourneyEventType
    at_s: float
    """The time on the clock of the ingress."""
    rank: int | None = None
    """The engine of the attempt. None, here and below, means that there is none."""
    attempt: int | None = None
    reason: str | None = None
    """Why the request was resubmitted, or how it finished."""


class Journey:
    """One request from its first placement to its finish.

    Times never decrease: an event that is reported late, or with a wrong duration, is placed
    between the previous event and now. Nothing follows the finish.
    """

    __slots__ = ("_arrived_s", "_attempt", "events", "num_left_out", "stats")

    def __init__(self) -> None:
        self.events: list[PlacedEvent] = []
        self.num_left_out = 0
        """Number of events above `MAX_EVENTS`."""
        self.stats: FinishedRequestStats | None = None
        """Set at the finish."""
        self._attempt = 0
        """The newest attempt for which an engine has reported events."""
        self._arrived_s = 0.0
        """When that attempt arrived at its engine."""

    @property
    def finished(self) -> bool:
        return self.stats is not None

    def add(
        self,
        kind: JourneyEventType,
        now_s: float,
        rank: int | None = None,
        attempt: int | None = None,
        reason: str | None = None,
    ) -> None:
        if self.finished:
            return
        events = self.events
        if len(events) >= MAX_EVENTS and kind is not JourneyEventType.FINISHED:
            self.num_left_out += 1
            return
        at_s = max(now_s, events[-1].at_s) if events else now_s
        events.append(PlacedEvent(kind, at_s, rank, attempt, reason))

    def add_reported(
        self, reported: Sequence[JourneyEvent], rank: int, attempt: int, now_s: float
    ) -> None:
        """Adds the events of an attempt, in order; the report has just arrived."""
        if reported and attempt != self._attempt:
            self._attempt, self._arrived_s = attempt, now_s - reported[-1].since_arrival_s
        for event in reported:
            at_s = min(self._arrived_s + event.since_arrival_s, now_s)
            self.add(event.kind, at_s, rank, attempt)

    def finish(
        self, now_s: float, rank: int | None, attempt: int | None, stats: FinishedRequestStats
    ) -> None:
        self.add(JourneyEventType.FINISHED, now_s, rank, attempt, stats.finish_reason)
        if self.stats is None:
            self.stats = stats
