"""Time in which nothing could be received does not count as silence; the clock is scripted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swell.coordinator.transport.listening_clock import ListeningClock

LIMIT_S = 8.0


def test_a_loop_that_keeps_its_rhythm_counts_every_second() -> None:
    clock = ListeningClock(LIMIT_S)
    assert [clock.advance(now) for now in (100.0, 101.0, 102.5, 104.5)] == [0.0, 1.0, 2.5, 4.5]


def test_a_late_loop_counts_a_part_of_the_limit() -> None:
    clock = ListeningClock(LIMIT_S)
    clock.advance(0.0)
    assert clock.advance(1000.0) == LIMIT_S / 4
    assert clock.advance(1001.0) == LIMIT_S / 4 + 1.0


def test_reading_commits_nothing() -> None:
    clock = ListeningClock(LIMIT_S)
    clock.advance(0.0)
    assert [clock.read(1.0), clock.read(50.0), clock.read(1.0)] == [1.0, 2.0, 1.0]
    assert clock.advance(1.5) == 1.5


def test_a_clock_that_jumps_back_loses_no_time() -> None:
    clock = ListeningClock(LIMIT_S)
    clock.advance(10.0)
    clock.advance(11.0)
    assert clock.read(3.0) == clock.advance(3.0) == 1.0
    assert clock.advance(4.0) == 2.0


@given(st.lists(st.floats(0.0, 1e6), max_size=40))
def test_silence_needs_more_than_four_polls_and_never_exceeds_real_time(gaps: list[float]) -> None:
    clock, now = ListeningClock(LIMIT_S), 0.0
    clock.advance(now)
    for looks, gap in enumerate(gaps, 1):
        now += gap
        assert clock.advance(now) <= min(now, looks * LIMIT_S / 4) * (1 + 1e-9)
