"""The timeline of a request, as clients and operators read it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from swell.cluster.api.bodies.protocol_base import Body
from swell.cluster.client.requests.journey import Journey
from swell.cluster.client.requests.request_history import RequestRecord
from swell.engine.wire import JourneyEventType

IncludeTimings = Annotated[
    bool | None,
    Meta(
        description="If true, the response (or the last event of its stream) has `timings`: the "
        "events in the life of the request, each with the milliseconds since it was received "
        "and the engine's rank."
    ),
]
"""A field that only Swell has."""


class TimedEvent(Body, kw_only=True):
    """One event of the timeline. `event` is received, routed, queued, scheduled, first_token,
    preempted, resubmitted or finished; `rank` and `attempt` name the engine and the placement, if
    there is one."""

    event: str
    ms: float
    """Milliseconds since the request was received."""
    hop_ms: float
    """Milliseconds since the previous event."""
    rank: int | None = None
    attempt: int | None = None
    reason: str | None = None
    """The reason why the request was resubmitted, or how it finished."""


class ChoiceTimings(Body, kw_only=True):
    """The timeline of one answer; with `best_of` there is also one for each answer that was not
    kept."""

    index: int
    events: list[TimedEvent]
    events_left_out: int = 0


class Timings(Body, kw_only=True):
    """The timeline of a request."""

    received_at: float
    """Seconds since 1970."""
    choices: list[ChoiceTimings]


def timings_of(record: RequestRecord) -> Timings:
    """Returns the timeline of a request so far."""
    return Timings(
        received_at=record.received_at,
        choices=[
            ChoiceTimings(
                index=index,
                events=_timed_events(record.received_s, journey),
                events_left_out=journey.num_left_out,
            )
            for index, journey in enumerate(record.journeys)
        ],
    )


def _timed_events(received_s: float, journey: Journey) -> list[TimedEvent]:
    events = [TimedEvent(event=str(JourneyEventType.RECEIVED), ms=0.0, hop_ms=0.0)]
    for event in journey.events:
        ms = max(events[-1].ms, round((event.at_s - received_s) * 1000, 3))
        events.append(
            TimedEvent(
                event=str(event.kind),
                ms=ms,
                hop_ms=round(ms - events[-1].ms, 3),
                rank=event.rank,
                attempt=event.attempt,
                reason=event.reason,
            )
        )
    return events
