"""The phases of a start: every second belongs to one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swell.engine.serving.start_timeline import StartPhase, StartTimeline


def test_details_do_not_begin_a_phase_and_a_phase_that_returns_continues() -> None:
    now = [0.0]
    timeline = StartTimeline("starting", lambda: now[0])
    steps = ["loading weights, 0%", "loading weights, 50%", "forming groups", "loading weights"]
    for second, text in enumerate(steps, 1):
        now[0] = float(second)
        timeline.enter(text)
        assert timeline.text == text
    now[0] = 10.0
    assert timeline.finish() == [
        StartPhase("starting", 1.0),
        StartPhase("loading weights", 2.0 + 6.0),
        StartPhase("forming groups", 1.0),
    ]


@given(st.lists(st.tuples(st.floats(0, 100), st.sampled_from(["a", "a, 1", "b", "c, 2"]))))
def test_the_phases_add_up_to_the_whole_start(steps: list[tuple[float, str]]) -> None:
    now = [5.0]
    timeline = StartTimeline("a", lambda: now[0])
    for seconds, text in steps:
        now[0] += seconds
        timeline.enter(text)
    phases = timeline.finish()
    assert sum(each.seconds for each in phases) == pytest.approx(now[0] - 5.0)
    assert {each.phase for each in phases} == {"a", *(t.partition(",")[0] for _, t in steps)}
