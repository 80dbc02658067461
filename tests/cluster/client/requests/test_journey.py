"""The events of a request: times never decrease, there is exactly one final event, and every
attempt is recorded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swell.cluster.client.requests.journey import MAX_EVENTS, Journey, PlacedEvent
from swell.engine.kv.block_hash import pack_tokens
from swell.engine.request import Request
from swell.engine.wire import EngineCoreRequest, JourneyEvent
from swell.engine.wire import JourneyEventType as Kind
from swell.worker.sampler_wire import SamplerParams
from tests.support.core_requests import finished_stats

ODD_S = st.floats(-1e3, 1e3, allow_nan=False)
"""Times in seconds, including invalid ones that an engine might report."""
REPORTED = st.lists(
    st.builds(JourneyEvent, st.sampled_from([Kind.QUEUED, Kind.SCHEDULED, Kind.PREEMPTED]), ODD_S),
    max_size=3,
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([Kind.FIRST_TOKEN, Kind.QUEUED]), ODD_S),
        st.tuples(st.just(Kind.RESUBMITTED), ODD_S),
        st.tuples(REPORTED, ODD_S),
    ),
    max_size=40,
)


def assert_lawful(events: list[PlacedEvent]) -> None:
    times = [event.at_s for event in events]
    assert times == sorted(times)
    assert [event.kind for event in events].count(Kind.FINISHED) == 1
    assert events[-1].kind is Kind.FINISHED


@given(STEPS, st.booleans())
def test_times_never_decrease_and_the_end_is_unique(steps, twice: bool) -> None:
    """This holds for any reports, in any order, with repetitions."""
    journey, attempt = Journey(), 1
    journey.add(Kind.ROUTED, 0.0, 0, attempt)
    for what, now_s in steps:
        if isinstance(what, list):
            journey.add_reported(what, attempt - 1, attempt, now_s)
            continue
        journey.add(what, now_s, attempt - 1, attempt)
        if what is Kind.RESUBMITTED:
            attempt += 1
            journey.add(Kind.ROUTED, now_s, attempt - 1, attempt)
    for _ in range(1 + twice):
        journey.finish(5.0, attempt - 1, attempt, finished_stats("stop"))
    journey.add(Kind.FIRST_TOKEN, 9.0)
    assert_lawful(journey.events)
    assert len(journey.events) <= MAX_EVENTS + 1
    if not journey.num_left_out:
        routed = [e.attempt for e in journey.events if e.kind is Kind.ROUTED]
        assert routed == list(range(1, attempt + 1))
        assert {e.rank for e in journey.events if e.attempt} == set(range(attempt))


@given(
    clock_offset_s=st.floats(-1e6, 1e6),
    way_s=st.floats(0, 100),
    wait_s=st.floats(0, 100),
    back_s=st.floats(0, 100),
)
def test_events_of_an_engine_with_any_clock_are_placed(
    clock_offset_s: float, way_s: float, wait_s: float, back_s: float
) -> None:
    """Placed events are late by the travel time of the report, and by nothing else."""
    arrived_s = clock_offset_s + way_s
    scheduled_s = arrived_s + wait_s
    report = [
        JourneyEvent(Kind.QUEUED, 0.0),
        JourneyEvent(Kind.SCHEDULED, scheduled_s - arrived_s),
    ]
    journey = Journey()
    journey.add(Kind.ROUTED, 0.0, 4, 1)
    now_s = way_s + wait_s + back_s
    journey.add_reported(report, 4, 1, now_s)
    _, queued, scheduled = journey.events
    assert scheduled.at_s == now_s
    assert abs(queued.at_s - (way_s + back_s)) < 1e-3
    assert (queued.rank, queued.attempt) == (scheduled.rank, scheduled.attempt) == (4, 1)


def test_a_preemption_is_placed_by_the_arrival_of_its_attempt() -> None:
    journey = Journey()
    journey.add(Kind.ROUTED, 10.0, 0, 1)
    first = [JourneyEvent(Kind.QUEUED, 0.0), JourneyEvent(Kind.SCHEDULED, 1.0)]
    journey.add_reported(first, 0, 1, 11.5)
    journey.add(Kind.FIRST_TOKEN, 12.0, 0, 1)
    again = [JourneyEvent(Kind.PREEMPTED, 3.0), JourneyEvent(Kind.SCHEDULED, 7.0)]
    journey.add_reported(again, 0, 1, 17.6)
    journey.finish(20.0, 0, 1, finished_stats("length"))
    placed = [(str(event.kind), event.at_s) for event in journey.events]
    assert placed == [
        ("routed", 10.0),
        ("queued", 10.5),
        ("scheduled", 11.5),
        ("first_token", 12.0),
        ("preempted", 13.5),
        ("scheduled", 17.5),
        ("finished", 20.0),
    ]


def test_events_are_bounded_and_the_end_is_kept() -> None:
    journey = Journey()
    for now_s in range(10 * MAX_EVENTS):
        journey.add(Kind.ROUTED, float(now_s), 0, 1)
    journey.finish(1e4, 0, 1, finished_stats("stop"))
    assert len(journey.events) == MAX_EVENTS + 1
    assert journey.num_left_out == 9 * MAX_EVENTS
    assert_lawful(journey.events)


def test_an_engine_reports_what_happened_since_the_slot_before() -> None:
    core = EngineCoreRequest("r", [1, 2], SamplerParams(), max_tokens=4)
    request = Request(core, b"client", 0, 1, queued_at=100.0)
    assert request.token_ids == pack_tokens([1, 2])
    request.scheduled_s = 0.25
    assert request.journey_events() == [
        JourneyEvent(Kind.QUEUED, 0.0),
        JourneyEvent(Kind.SCHEDULED, 0.25),
    ]
    request.num_preemptions, request.preempted_s, request.scheduled_s = 1, 0.5, 2.0
    assert request.journey_events() == [
        JourneyEvent(Kind.PREEMPTED, 0.5),
        JourneyEvent(Kind.SCHEDULED, 2.0),
    ]
