"""The limits of the answers that an ingress keeps, over any order of answers, events, readers and
completions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swell.cluster.api.bodies.http_errors import HTTPError
from swell.cluster.api.resumable.event_id import AnswerOrigin, EventId, parse_event_id
from swell.cluster.api.resumable.generation import Generation, GenerationState
from swell.cluster.api.resumable.generation_table import GenerationTable
from swell.cluster.api.store.bounded_table import owner_of, table_key
from swell.cluster.text.errors import BadRequest
from swell.configs.serve import ResumableLimits

LIMITS = ResumableLimits(
    resumable_answers=4, resumable_answers_per_key=2, resumable_bytes=600, resumable_age_s=10.0
)
NAME = "0123456789abcdef" * 2
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "grow", "end", "fail", "join", "leave", "wait"]),
        st.sampled_from(["", "a", "b", "c"]),
        st.integers(0, 3),
    ),
    min_size=25,
    max_size=60,
)


@given(STEPS)
def test_limits_hold_and_running_answers_are_never_dropped(
    steps: list[tuple[str, str, int]],
) -> None:
    table, now_s = GenerationTable(LIMITS), 0.0
    running: dict[str, Generation] = {}
    for what, owner, number in steps:
        key = table_key(owner, str(number))
        generation = table.find(key, now_s)
        if what == "wait":
            now_s += 4 * number
        elif what == "add" and generation is None:
            new = Generation(key, NAME)
            try:
                table.add(new, now_s)
            except HTTPError:
                busy = [owner_of(one.key) for one in table if one.in_use]
                full = len(busy) == LIMITS.resumable_answers
                assert full or (owner and busy.count(owner) == 2)
            else:
                new.begin(1, "", {})
                running[key] = new
        elif generation is None:
            continue
        elif what == "grow" and generation.is_running:
            generation.add_events(b"data: %d\n\n" % 10**250, numbered=True)
            table.grew(generation)
        elif what == "end" and generation.is_running:
            generation.end(GenerationState.DONE)
            del running[key]
            table.ended(generation, now_s)
        elif what == "fail" and generation.is_running:
            generation.end(GenerationState.FAILED)
            del running[key]
            table.remove(generation)
        elif what == "join":
            generation.join()
        elif what == "leave" and generation.readers:
            generation.leave()
        assert len(table) <= LIMITS.resumable_answers
        for one in "abc":
            own_kept = [kept for kept in table if owner_of(kept.key) == one]
            assert len(own_kept) <= LIMITS.resumable_answers_per_key
        assert table.size_bytes == sum(one.size_bytes for one in table)
        assert table.size_bytes <= LIMITS.resumable_bytes
        assert all(table.holds(one) for one in running.values())


def test_the_answer_that_finished_first_without_a_reader_is_evicted() -> None:
    table = GenerationTable(LIMITS)
    kept = [Generation(f"/{number}", NAME) for number in range(4)]
    for generation in kept:
        table.add(generation, 0.0)
    for generation in reversed(kept[:3]):
        generation.end(GenerationState.DONE)
        table.ended(generation, 0.0)
    kept[0].join()
    table.add(Generation("/new", NAME), 0.0)
    assert [table.holds(one) for one in kept] == [True, True, False, True]
    assert table.find("/1", 10.0) is kept[1]
    assert table.find("/1", 10.1) is None
    assert table.find("/0", 99.0) is kept[0], "a client reads it"
    kept[0].leave()
    assert table.find("/0", 99.0) is None
    assert table.find("/3", 99.0) is kept[3], "it still runs"


@given(
    st.integers(0, 10**11 - 1),
    st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20),
    st.sampled_from(["", "69fd0f28ab2b8bdf8e62e4170cc32bf9"]),
    st.integers(0, 10**9 - 1),
)
def test_event_ids_parse_to_what_was_written(
    created: int, version: str, adapter: str, number: int
) -> None:
    origin = AnswerOrigin(NAME, created, version, adapter)
    assert parse_event_id(f"{origin.event_prefix()}{number}") == EventId(origin, number)


@given(st.text(max_size=80) | st.from_regex(r"[0-9a-f]{31,33}\.\d*\.\w*\.\d*", fullmatch=True))
def test_other_texts_are_not_event_ids(text: str) -> None:
    try:
        found = parse_event_id(text)
    except BadRequest:
        return
    assert parse_event_id(f"{found.origin.event_prefix()}{found.number}") == found


def test_the_error_that_ends_an_answer_has_no_event_number() -> None:
    generation = Generation("/k", NAME)
    generation.begin(7, "v", {})
    generation.add_events(b"event: a\ndata: 1\n\n: a comment\n\ndata: 2\n\n", numbered=True)
    generation.add_events(b"data: error\n\n", numbered=False)
    assert generation._events == [
        b"id: %b.7.v.1\nevent: a\ndata: 1\n\n" % NAME.encode(),
        b"id: %b.7.v.2\ndata: 2\n\n" % NAME.encode(),
        b"data: error\n\n",
    ]


@pytest.mark.parametrize("number", [0, 1])
def test_an_answer_without_its_first_events_cannot_be_read_from_the_start(number: int) -> None:
    generation = Generation("/k", NAME)
    generation.begin(7, "v", {})
    generation.add_events(b"data: 1\n\ndata: 2\n\ndata: 3\n\n", numbered=True)
    assert generation.continues(None)
    generation.drop_half()
    origin = AnswerOrigin(NAME, 7, "v")
    assert not generation.continues(None)
    assert not generation.continues(EventId(origin, number))
    assert generation.continues(EventId(origin, 2))
    assert not generation.continues(EventId(AnswerOrigin(NAME, 8, "v"), 2))
