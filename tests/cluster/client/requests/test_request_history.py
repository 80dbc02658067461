"""The request records that can be found, and how long they are kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swell.cluster.client.requests.journey import Journey
from swell.cluster.client.requests.request_history import MAX_FOUND, RequestHistory, RequestRecord

LIMIT, LIMIT_S = 4, 10.0
STEPS = st.lists(
    st.tuples(st.sampled_from(["begin", "end", "wait"]), st.integers(0, 5), st.floats(0, 8)),
    max_size=60,
)


def make(number: int, answers: int = 1, request_id: str = "") -> RequestRecord:
    journeys = [Journey() for _ in range(answers)]
    request_id = request_id or f"r{number}"
    return RequestRecord(f"chatcmpl-{number}", request_id, "chat", "m", 0.0, 0.0, journeys)


@given(STEPS)
def test_running_requests_are_found_and_finished_ones_are_bounded(steps) -> None:
    history, now_s, running, number = RequestHistory(LIMIT, LIMIT_S), 0.0, [], 0
    ended: list[tuple[float, RequestRecord]] = []
    for what, value, wait_s in steps:
        if what == "begin":
            record, number = make(number, value), number + 1
            history.begin(record)
            running.append(record)
        elif what == "end" and running:
            record = running.pop(value % len(running))
            history.end(record, now_s)
            ended.append((now_s, record))
        else:
            now_s += wait_s
        for record in running:
            assert history.find(record.id, now_s) == [record]
            assert history.find(record.request_id, now_s) == [record]
        kept = [record for _, record in ended if history.find(record.id, now_s)]
        young = [record for at_s, record in ended if now_s - at_s <= LIMIT_S]
        assert kept == young[len(young) - len(kept) :]
        assert sum(max(1, len(record.journeys)) for record in kept) <= LIMIT
        assert len(history) == 2 * (len(kept) + len(running))


def test_all_requests_under_one_id_are_found() -> None:
    """A client that retries sends the same id."""
    history = RequestHistory(100, LIMIT_S)
    records = [make(number, request_id="mine") for number in range(MAX_FOUND + 3)]
    for record in records:
        history.begin(record)
    history.end(records[1], 1.0)
    assert history.find("mine", 1.0) == records[3:]
    assert history.find("chatcmpl-1", 1.0) == [records[1]]
    assert history.find("mine", 99.0) == records[3:]
    assert history.find("chatcmpl-1", 99.0) == []


def test_a_limit_of_zero_keeps_no_finished_request() -> None:
    history, record = RequestHistory(0, LIMIT_S), make(0)
    history.begin(record)
    assert history.find("r0", 0.0) == [record]
    history.end(record, 0.0)
    assert not history.find("r0", 0.0)
    assert len(history) == 0


def test_a_repeated_id_is_among_the_newest() -> None:
    history = RequestHistory(100, LIMIT_S)
    first, retry = (make(0, request_id="mine") for _ in range(2))
    history.begin(first)
    for number in range(1, 30):
        history.begin(make(number))
    history.begin(retry)
    newest = history.newest(5, 0.0)
    assert any(record is retry for record in newest) and len(newest) == 5
