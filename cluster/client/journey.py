"""What happens to a request, event by event, on the clock of its ingress: pure.

An engine reports durations since the attempt arrived there, because its clock is another one. Its
report is sent when the request is scheduled, so the moment at which it comes is taken for that of
its last event; what is between is only the way back. The way there includes the time in which the
engine computed a step and read no messages, and is what remains:

    ingress   routed                                      report comes
                 |                                              |
    engine       |-- way, reading --> queued ---> scheduled ---(way back, not known)
                                        |<- reported ->|
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from swell.engine.wire import JourneyEvent, JourneyEventType

MAX_EVENTS = 64
"""Of one request; an undisturbed one has 5. Later ones are counted, but for the end."""


class PlacedEvent(msgspec.Struct, frozen=True, gc=False):
    """An event at its time."""

    kind: JourneyEventType
    at_s: float
    """On the clock of the ingress."""
    rank: int | None = None
    """The engine of the attempt; None, here and below: there is none."""
    attempt: int | None = None
    reason: str | None = None
    """Why the request was resubmitted, or how it finished."""


class Journey:
    """One request from its first placement to its end.

    Times never fall: an event that is reported late, or whose duration is wrong, is placed between
    the event before it and now. Nothing follows the end.
    """

    __slots__ = ("_arrived_s", "_attempt", "events", "finished", "num_left_out", "num_tokens")

    def __init__(self) -> None:
        self.events: list[PlacedEvent] = []
        self.num_left_out = 0
        """Events above `MAX_EVENTS`."""
        self.finished = False
        self.num_tokens = 0
        """Output tokens at the end."""
        self._attempt = 0
        """The last one of which an engine has reported."""
        self._arrived_s = 0.0
        """When that arrived there."""

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
        """Events of an attempt, in order; the report has just come."""
        if reported and attempt != self._attempt:
            self._attempt, self._arrived_s = attempt, now_s - reported[-1].since_arrival_s
        for event in reported:
            at_s = min(self._arrived_s + event.since_arrival_s, now_s)
            self.add(event.kind, at_s, rank, attempt)

    def finish(
        self, now_s: float, rank: int | None, attempt: int | None, reason: str, num_tokens: int
    ) -> None:
        self.num_tokens = num_tokens
        self.add(JourneyEventType.FINISHED, now_s, rank, attempt, reason)
        self.finished = True
