"""Shrinking keeps the broken law, and removes the parts of a scenario that do not contribute to
it."""

from __future__ import annotations

from tests.simulator.faults import FAULTS
from tests.simulator.scenario import Scenario, draw
from tests.simulator.shrink import kind_of, shrink


def test_unneeded_faults_and_requests_are_removed() -> None:
    scenario = next(
        found
        for seed in range(1000)
        if len((found := draw(seed, tuple(FAULTS))).requests) > 5 and len(found.faults) == 4
    )
    first, last = scenario.faults[0], scenario.requests[-1]
    runs = 0

    def is_broken(each: Scenario) -> bool:
        nonlocal runs
        runs += 1
        kinds = [fault.kind for fault in each.faults]
        return first.kind in kinds and any(request.at == last.at for request in each.requests)

    small = shrink(scenario, is_broken)
    assert [fault.kind for fault in small.faults] == [first.kind]
    assert [request.at for request in small.requests] == [last.at]
    assert len(small.requests[0].prompt) == small.requests[0].max_tokens == 1
    assert small.faults[0].trigger is None and small.faults[0].time_s <= 0.1
    assert not small.operations and runs < 200


def test_a_failure_is_identified_by_its_law() -> None:
    """The engine, the request and the time do not matter."""
    first, again = "sim-engine-0-ab12.1 was ended at 3.50 s", "sim-engine-2-ff00.1 was ended at 9 s"
    assert kind_of(first) == kind_of(again) == "was ended at s"
    assert kind_of("r3 is late") != kind_of("r3 never ended, 2 tokens came")
