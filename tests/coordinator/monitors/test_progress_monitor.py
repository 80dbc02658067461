"""Silence and missing progress of subjects; the clock is scripted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swell.coordinator.monitors.progress_monitor import ProgressMonitor

LIMIT_S = 4.0
STEP_S = LIMIT_S / 8


def watching(*subjects: str) -> ProgressMonitor[str]:
    monitor: ProgressMonitor[str] = ProgressMonitor(LIMIT_S)
    monitor.advance(0.0)
    monitor.set_subjects(subjects, 0.0)
    return monitor


def times(until_s: float, from_s: float = 0.0) -> list[float]:
    """Returns the times of a loop that runs regularly."""
    return [from_s + STEP_S * turn for turn in range(1, round((until_s - from_s) / STEP_S) + 1)]


def test_a_newcomer_has_the_full_time_for_its_first_report() -> None:
    monitor = watching("a")
    for now in times(3.0):
        monitor.advance(now)
    monitor.set_subjects(["a", "b"], 3.0)
    for now in times(LIMIT_S + STEP_S, 3.0):
        monitor.advance(now)
    assert monitor.silent_s(LIMIT_S) == {"a": LIMIT_S + STEP_S}


@pytest.mark.parametrize(
    ("counters", "busy", "without_s"),
    [
        ((7, 7, 7), (True, True, True), 2.0),
        ((7, 8, 8), (True, True, True), 1.0),
        ((7, 7, 8), (True, True, True), None),
        ((7, 7, 7), (False, False, False), None),  # an idle subject is not stalled
        # it has had work only since the last report
        ((7, 7, 7), (True, False, True), None),
        ((7, 7, 7), (False, True, True), 1.0),
    ],
)
def test_progress_is_a_change_of_the_counter_of_a_busy_one(counters, busy, without_s) -> None:
    monitor = watching("a")
    for turn, (counter, is_busy) in enumerate(zip(counters, busy, strict=True)):
        monitor.on_report("a", counter, float(turn), is_busy)
        monitor.advance(float(turn))
    assert monitor.without_progress_s(0.0) == ({} if without_s is None else {"a": without_s})


def test_an_idle_subject_never_counts_as_stalled() -> None:
    monitor = watching("a")
    monitor.on_report("a", 5, 0.0, busy=False)
    monitor.advance(1.0)
    assert monitor.without_progress_s(0.0) == {}


def test_events_before_the_start_time_do_not_count() -> None:
    monitor = watching("a")
    for now in (0.0, 1.0, 2.0, 3.0):
        monitor.on_report("a", 5, now)
        monitor.advance(now)
    assert monitor.without_progress_s(0.0, since=2.0) == {"a": 1.0}


def test_excused_subjects_restart_and_removed_ones_are_forgotten() -> None:
    monitor = watching("a", "b")
    for now in (0.0, 1.0, 2.0):
        for subject in ("a", "b"):
            monitor.on_report(subject, 5, now)
        monitor.advance(now)
    monitor.excuse(["a", "unknown"])
    assert monitor.without_progress_s(0.0) == {"b": 2.0}
    monitor.remove("b")
    assert monitor.subjects == {"a"} and monitor.without_progress_s(0.0) == {}


def test_time_while_the_caller_was_stopped_is_not_silence() -> None:
    monitor = watching("a")
    monitor.advance(1000.0)
    assert monitor.silent_s(LIMIT_S) == {}
    for late in range(2, 7):
        monitor.advance(1000.0 * late)
    assert set(monitor.silent_s(LIMIT_S)) == {"a"}, "however late each turn is"


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.floats(0.0, 1e6))
def test_reports_within_the_limit_are_never_silence_or_a_stall(gaps, origin) -> None:
    """Reports within the limit are never silence or a stall, at any interval between them."""
    monitor, now = ProgressMonitor(LIMIT_S), origin
    monitor.set_subjects("ab", now)
    for counter, gap in enumerate(gaps):
        now += gap / 5 * LIMIT_S * 0.99
        monitor.advance(now)
        assert monitor.silent_s(LIMIT_S) == monitor.without_progress_s(LIMIT_S) == {}
        for subject in "ab":
            monitor.on_report(subject, counter, now)
        monitor.advance(now)
        assert monitor.silent_s(LIMIT_S) == monitor.without_progress_s(LIMIT_S) == {}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 7)), max_size=30))
def test_a_subject_that_reports_and_progresses_is_never_found(gaps) -> None:
    """A subject that reports and progresses is never named; each may be silent for less than the
    limit at any time."""
    monitor, now, counter = watching("a", "b", "c"), 0.0, 0
    for silent, turns in gaps:
        for turn in range(turns + 1):
            now, counter = now + STEP_S, counter + 1
            for subject in "abc":
                if subject != silent or turn == turns:
                    monitor.on_report(subject, counter, now)
            monitor.advance(now)
            assert monitor.silent_s(LIMIT_S) == monitor.without_progress_s(LIMIT_S) == {}
