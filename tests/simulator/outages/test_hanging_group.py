"""A group hangs while it should grow, and its coordinator is lost twice. The newcomers have
requests and cannot compute before the group has paused, but they are not the cause and must not be
killed."""

from __future__ import annotations

from tests.simulator.kernel.kernel import WORLD
from tests.simulator.laws.laws import Run
from tests.simulator.scenario import SLOW_STEP_S, AtMessage, Fault, Operation, Request, Scenario

_HANG_AT_S, _SCALE_AT_S = 3.5, 3.6
_KILLS_AT_S = (5.5, 8.5)
_SENT_AT_S = 8.0
"""A time between the kills, when the first new coordinator has found the newcomers, and ingresses
send them requests."""


def test_only_the_engine_that_hangs_is_ended() -> None:
    early = Request(_HANG_AT_S - 0.3, 0, (1, 2, 3), 4, 0)
    requests = (early, *(Request(_SENT_AT_S + i / 10, 0, (1, 2, 3), 4, i) for i in range(4)))
    kills = tuple(Fault("kill-control", at_s) for at_s in _KILLS_AT_S)
    grow = Operation(_SCALE_AT_S, "scale", 3)
    run = Run(Scenario(0, 1, 1, True, requests, kills, (grow,)))
    plane = run.plane
    hung: list[str] = []

    def hang() -> None:
        [engine] = plane.engines
        engine.executor.hangs = True
        hung.append(engine.process.name)

    plane.kernel.at(_HANG_AT_S, WORLD, hang)
    run.faults.num_hangs += 1  # the requests that it holds up have as much time as a hang may take
    run.faults.kinds.add("hang")
    ended: list[str] = []
    plane.ray.on_end.append(lambda process: ended.append(process.name))
    assert run.judge().broken == []
    assert hung and set(ended) == set(hung)
    assert plane.manager.manager.target == 3


def test_requests_that_wait_for_the_blocks_of_others_are_not_late() -> None:
    """One engine has twelve long requests, and its group does not form for eight seconds, because
    a connection delivers nothing."""
    requests = [Request(3.5 + 0.05 * index, 0, (index,), 300, index) for index in range(12)]
    faults = (
        Fault("black-hole", 3.483929932642651, 3, 1.5577398280001487),
        Fault("kill-control", 4.995054381362293, 8),
        Fault("black-hole", 4.963041109040684, 10, 3.844628475273239),
        Fault("black-hole", 4.225204290818183, 7, 30.8218579595, AtMessage("Joined", 2)),
    )
    scenario = Scenario(
        seed=101,
        engines=3,
        ingresses=1,
        expert=True,
        requests=tuple(requests),
        faults=faults,
        operations=(Operation(4.2, "scale", 1), Operation(5.2, "scale", 3)),
        control_host="host1",
        step_s=SLOW_STEP_S,
        rooms=(1, 3, 2),
        prefill_engines=1,
    )
    run = Run(scenario)
    assert run.judge().broken == []
    *_, last = run.faults.happened
    assert last.startswith("7.596 black-hole sim-engine-2")
