"""Ray restarts the coordinator. The manager waits for the roster meanwhile, and gets the answer of
the successor late."""

from __future__ import annotations

from typing import Any

from tests.simulator.kernel.kernel import WORLD
from tests.simulator.laws.laws import Run
from tests.simulator.scenario import HOSTS, SLOW_STEP_S, Fault, Operation, Request, Scenario

_LOOKS_FROM_S, _KILLED_AT_S, _LOOK_S, _LOOKS = 3.5, 4.0, 0.1, 60


def test_the_status_names_the_coordinator_that_has_answered() -> None:
    run = Run(Scenario(0, 1, 1, False, (), ()))
    plane, kernel = run.plane, run.plane.kernel
    pids: list[tuple[int, int]] = []

    async def read() -> None:
        coordinators = list(plane.coordinators)
        body: dict[str, Any] = await plane.manager.manager.describe()
        if coordinators == plane.coordinators and body["coordinator"]["error"] is None:
            pids.append((body["coordinator"]["pid"], plane.ray.pid_of(coordinators[-1][0])))

    def look() -> None:
        process = plane.manager.process
        kernel.soon(process, lambda: process.loop.create_task(read(), name="status"))

    kernel.at(_KILLED_AT_S, WORLD, lambda: plane.coordinators[-1][0].kill())
    for number in range(_LOOKS):
        kernel.at(_LOOKS_FROM_S + _LOOK_S * number, WORLD, look)
    assert run.judge().broken == []
    assert len({pid for _, pid in pids}) == 2, "before and after the restart"
    assert [pid for pid in pids if pid[0] != pid[1]] == []


def test_the_next_manager_drains_an_engine_that_joined_while_others_were_silent() -> None:
    """The manager starts while one engine is stopped and another one loads. The other engine joins
    the restarted coordinator before the manager has all answers. It serves a request, and runs an
    older version than the target."""
    faults = Fault("stop", 7.35, 1, 6.8, changing=True), Fault("kill-control", 11.2, 7)
    operations = (
        Operation(3.6, "upgrade", 1),
        Operation(5.6, "update_weights", 0),
        Operation(9.62, "redeploy", 1),
    )
    scenario = Scenario(
        seed=81000000179,
        engines=2,
        ingresses=3,
        expert=False,
        requests=(Request(12.66, 2, (2,), 60, 7),),
        faults=faults,
        operations=operations,
        control_host=HOSTS[2],
        step_s=SLOW_STEP_S,
        autoscaled=True,
        rooms=(0, 3, 3),
        slow_load_s=2.0,
    )
    run = Run(scenario)
    assert run.judge().broken == []
    [request] = run.plane.requests
    assert request.state is not None and request.state.attempt == 1
