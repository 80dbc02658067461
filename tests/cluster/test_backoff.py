"""How often, and how fast, engines that fail are started again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swell.cluster.backoff import MAX_DEATHS, MAX_FAILURES, WINDOW_S, YOUNG_S, Backoff


def test_waits_double_from_nothing_up_to_a_limit() -> None:
    backoff, waits = Backoff(), []
    for _ in range(8):
        backoff.failed(0, 100.0)
        waits.append(backoff.wait_s(0, 100.0))
    assert waits == [0, 0.5, 1, 2, 4, 8, 10, 10]
    assert backoff.wait_s(0, 104.0) == 6.0 and backoff.wait_s(0, 111.0) == 0.0


def test_the_first_replacement_starts_at_once() -> None:
    backoff = Backoff()
    assert backoff.wait_s(0, 0.0) == 0.0
    backoff.died(0, 1.0, 0.0)
    assert backoff.wait_s(0, 0.0) == 0.0
    backoff.died(0, 1.0, 5.0)
    assert backoff.wait_s(0, 5.0) == 0.5


def test_engines_that_die_young_are_given_up_although_each_start_succeeds() -> None:
    backoff = Backoff()
    for death in range(MAX_DEATHS + 1):
        assert not backoff.exhausted(0, 10.0 * death)
        backoff.started(0)
        backoff.died(0, 1.0, 10.0 * death)
    assert backoff.exhausted(0, 10.0 * MAX_DEATHS)


def test_deaths_that_lie_far_apart_are_no_pattern() -> None:
    backoff, now = Backoff(), 0.0
    for _ in range(50):
        now += WINDOW_S / MAX_DEATHS + 1
        backoff.died(0, 1.0, now)
        assert not backoff.exhausted(0, now) and backoff.wait_s(0, now) <= 4.0


def test_an_engine_that_lived_clears_what_was_before() -> None:
    backoff = Backoff()
    for _ in range(MAX_DEATHS):
        backoff.died(0, 1.0, 0.0)
    backoff.died(0, YOUNG_S, 1.0)
    assert backoff.wait_s(0, 1.0) == 0.0
    backoff.died(0, 1.0, 2.0)
    assert not backoff.exhausted(0, 2.0)


def test_failed_starts_are_given_up_and_one_success_forgets_them() -> None:
    backoff = Backoff()
    for _ in range(MAX_FAILURES - 1):
        backoff.failed(0, 0.0)
    assert not backoff.exhausted(0, 0.0)
    backoff.started(0)
    backoff.failed(0, 0.0)
    assert not backoff.exhausted(0, 0.0)
    for _ in range(MAX_FAILURES - 1):
        backoff.failed(0, 0.0)
    assert backoff.exhausted(0, 0.0)
    backoff.forget()
    assert not backoff.exhausted(0, 0.0) and backoff.wait_s(0, 0.0) == 0.0


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.floats(0, 100)), max_size=40))
def test_ranks_have_nothing_to_do_with_each_other(events) -> None:
    """What is decided for a rank is what would be decided if there were no other."""
    together, alone, now = Backoff(), Backoff(), 0.0
    for rank, starts, lived_s in events:
        now += 1.0
        for backoff in (together, alone) if rank == 0 else (together,):
            if starts:
                backoff.died(rank, lived_s, now)
            else:
                backoff.failed(rank, now)
        assert together.wait_s(0, now) == alone.wait_s(0, now) <= 10.0
        assert together.exhausted(0, now) == alone.exhausted(0, now)
