"""Engine 2 leaves a group that shares experts, and hangs, so the group does not change for long.
Meanwhile engine 1 is told to leave."""

from __future__ import annotations

from tests.simulator.kernel.kernel import WORLD
from tests.simulator.laws.laws import Run
from tests.simulator.scenario import Operation, Request, Scenario

_SCALE_AT_S, _AGAIN_AT_S, _LOOK_AT_S = 4.0, 5.0, 6.0


def test_an_engine_is_marked_before_the_group_has_changed() -> None:
    """The drain time of engine 1 begins, and it gets no more requests."""
    requests = tuple(Request(3.4 + i / 8, 0, (1, 2, 3), 200, i) for i in range(2))
    operations = (Operation(_SCALE_AT_S, "scale", 2), Operation(_AGAIN_AT_S, "scale", 1))
    run = Run(Scenario(0, 3, 1, True, requests, (), operations))
    plane, marked = run.plane, list[int]()

    def hang(ranks: list[int]) -> None:
        for engine in plane.living_engines:
            engine.executor.hangs |= engine.rank == 2

    def look() -> None:
        assert plane.coordinator is not None
        assert plane.coordinator._state_machine.detached == {2}
        engines = plane.manager.manager._fleet.engines.values()
        marked.extend(each.rank for each in engines if each.is_marked and not each.in_transition)

    plane.on_detach.append(hang)
    plane.kernel.at(_LOOK_AT_S, WORLD, look)
    run.faults.num_hangs += 1  # the requests that it holds up have as much time as a hang may take
    run.faults.kinds.add("hang")
    assert run.judge().broken == []
    assert marked == [1]
