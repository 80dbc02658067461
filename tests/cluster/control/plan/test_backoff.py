"""How often, and after which delays, failing engines are restarted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swell.cluster.control.plan.backoff import EARLY_DEATH_S, MAX_DEATHS, MAX_FAILURES, Backoff


def test_waits_start_at_zero_and_double() -> None:
    backoff, waits = Backoff(), []
    for _ in range(8):
        backoff = backoff.failed(0, 100.0)
        waits.append(backoff.wait_s(0, 100.0))
    assert waits == [0, 0.5, 1, 2, 4, 8, 16, 32]
    assert backoff.wait_s(0, 104.0) == 28.0 and backoff.wait_s(0, 132.0) == 0.0


def test_the_first_replacement_starts_at_once() -> None:
    backoff = Backoff()
    assert backoff.wait_s(0, 0.0) == 0.0
    backoff = backoff.died(0, 1.0, 0.0)
    assert backoff.wait_s(0, 0.0) == 0.0
    backoff = backoff.died(0, 1.0, 5.0)
    assert backoff.wait_s(0, 5.0) == 0.5


def test_engines_that_die_early_are_reported_although_each_start_succeeds() -> None:
    backoff = Backoff()
    for death in range(MAX_DEATHS + 1):
        assert not backoff.exhausted(0) and backoff.worst_missing_engine([], 0.0) is None
        backoff = backoff.started(0)
        backoff = backoff.died(0, 1.0, 10.0 * death, "no memory")
    missing = backoff.worst_missing_engine([], 10.0 * MAX_DEATHS)
    assert backoff.exhausted(0) and missing is not None
    for part in ("engine 0 has died", f"{MAX_DEATHS + 1} times", "no memory", "restarted in 8 s"):
        assert part in str(missing)
    assert backoff.worst_missing_engine([0], 10.0 * MAX_DEATHS) is None, "it lives"


def test_no_rank_is_abandoned_and_waits_have_a_limit() -> None:
    backoff, now, waits = Backoff(), 0.0, []
    for _ in range(5000):
        backoff = backoff.failed(0, now, "no room")
        waits.append(backoff.wait_s(0, now))
        now += waits[-1]
        assert backoff.wait_s(0, now) == 0.0
    assert waits == sorted(waits) and waits[-1] == max(waits) == 300.0


def test_a_long_lived_engine_clears_earlier_failures() -> None:
    backoff = Backoff()
    for _ in range(MAX_DEATHS):
        backoff = backoff.died(0, 1.0, 0.0)
    backoff = backoff.died(0, EARLY_DEATH_S, 1.0)
    assert backoff.wait_s(0, 1.0) == 0.0
    for _ in range(50):
        backoff = backoff.died(0, 1.0, 2.0)
        backoff = backoff.died(0, EARLY_DEATH_S, 2.0)
        assert not backoff.exhausted(0) and backoff.wait_s(0, 2.0) == 0.0


def test_failed_starts_are_reported_and_one_success_forgets_them() -> None:
    backoff = Backoff()
    for _ in range(MAX_FAILURES - 1):
        backoff = backoff.failed(0, 0.0, "no room")
    missing = backoff.worst_missing_engine([], 0.0)
    assert not backoff.exhausted(0) and str(missing) == "no room"
    backoff = backoff.started(0)
    backoff = backoff.failed(0, 0.0)
    assert not backoff.exhausted(0)
    for _ in range(MAX_FAILURES - 1):
        backoff = backoff.failed(0, 0.0, "no room")
    assert backoff.exhausted(0)
    assert str(backoff.worst_missing_engine([], 0.0)) == "no room (tried 5 times; next try in 4 s)"
    assert str(backoff.worst_missing_engine([], 9.0)) == "no room (tried 5 times; next try now)"


def test_permanent_failures_are_reported_at_once_and_still_retried() -> None:
    backoff = Backoff()
    backoff = backoff.failed(0, 0.0, "no such model", permanent=True)
    assert backoff.exhausted(0) and backoff.wait_s(0, 0.0) == 4.0
    backoff = backoff.failed(0, 4.0, "no such model", permanent=True)
    assert backoff.wait_s(0, 4.0) == 8.0


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.floats(0, 100)), max_size=40))
def test_ranks_are_independent(events) -> None:
    """The decisions for one rank do not depend on events of other ranks."""
    together, alone, now = Backoff(), Backoff(), 0.0
    for rank, dies, lived_s in events:
        now += 1.0

        def after(backoff: Backoff) -> Backoff:
            return backoff.died(rank, lived_s, now) if dies else backoff.failed(rank, now)  # noqa: B023

        together = after(together)
        alone = after(alone) if rank == 0 else alone
        assert together.wait_s(0, now) == alone.wait_s(0, now) <= 300.0
        assert together.exhausted(0) == alone.exhausted(0)
