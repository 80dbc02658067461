"""Another manager takes over a drain. The engine's time to finish starts once, when it gets no more
requests. It does not start earlier if the first manager could not reach the coordinator."""

from __future__ import annotations

from swell.coordinator.roster import Roster
from tests.simulator.laws.laws import Run
from tests.simulator.scenario import SLOW_STEP_S, AtMessage, Fault, Operation, Request, Scenario

_STOPPED_UNTIL_S = 16.85


def test_an_engine_without_a_leave_message_has_its_whole_drain_time() -> None:
    requests = [Request(15.0 + 0.05 * index, 0, (index,), 300, index) for index in range(9)]
    faults = (
        Fault("stop-control", 4.05, 0, _STOPPED_UNTIL_S - 4.05),
        Fault("second-manager", 10.25, 0, 12.5),
    )
    scenario = Scenario(
        seed=1,
        engines=3,
        ingresses=1,
        expert=False,
        requests=tuple(requests),
        faults=faults,
        operations=(Operation(9.2, "scale", 1),),
        control_host="host1",
        step_s=SLOW_STEP_S,
    )
    run = Run(scenario)
    assert run.judge().broken == []
    happened = [line.split()[1] for line in run.faults.happened]
    assert happened == ["stop-control", "second-manager"]


def test_a_drain_that_begins_during_a_redeploy_is_stored() -> None:
    """The coordinator is killed and the engine hangs, so its drain starts late. The manager must
    store that time for its successor."""
    faults = (
        Fault("black-hole", 3.122364667201774, 6, 0.09538594720619836),
        Fault("kill", 4.505728180886727, 3, 0.08094316855905323, same=True, changing=True),
        Fault("hang", 6.003807973949216, 2, 0.08912812948972618, same=True),
    )
    operations = (
        Operation(3.122364667201774, "pause", 0),
        Operation(6.292110813745745, "redeploy", 1),
        Operation(6.758497985582782, "resume", 0),
    )
    scenario = Scenario(
        seed=397,
        engines=1,
        ingresses=2,
        expert=False,
        requests=(Request(3.088790582636226, 0, (7,), 6, 7),),
        faults=faults,
        operations=operations,
        control_host="host0",
        step_s=0.03,
        rooms=(0, 3, 3),
        slow_load_s=2.0,
    )
    assert Run(scenario).judge().broken == []


def test_a_drain_that_is_over_does_not_start_again_at_the_next_manager() -> None:
    """Manager and coordinator are cut off from an engine that has left, so it does not terminate,
    and then both are lost. The next coordinator lists the engine as active."""
    cut = Fault("half-cut-pair", 4.6114, 2, 13.74387176398775, trigger=AtMessage("Joined", 3))
    operations = Operation(6.5936, "scale", 2), Operation(13.879849769935106, "scale", 1)
    scenario = Scenario(
        seed=2038,
        engines=3,
        ingresses=2,
        expert=True,
        requests=(),
        faults=(cut,),
        operations=operations,
        control_host="host2",
        step_s=SLOW_STEP_S,
        rooms=(2, 2, 2),
    )
    run = Run(scenario)
    left: list[list[int]] = []
    run.plane.on_detach.append(left.append)
    assert run.judge().broken == []
    assert left == [[2], [1], [1]] and len(run.plane.coordinators) == 2


def test_an_engine_that_has_left_does_not_join_again() -> None:
    """The manager is stopped when it lets the engine leave the roster, and is then lost. The only
    other engine replaces a worker when the next manager starts."""
    faults = (
        Fault("stop-control", 3.85, 5, 7.6, AtMessage("detach", 1)),
        Fault("kill-control", 10.44340574512398, 5),
        Fault("lose-worker", 11.326642581668846, 5),
    )
    operations = (
        Operation(4.056545835421769, "pause", 1),
        Operation(4.339509666121982, "scale", 1),
        Operation(30.0, "resume"),
    )
    scenario = Scenario(
        seed=5077,
        engines=2,
        ingresses=1,
        expert=True,
        requests=(Request(9.513646957254128, 0, (45,), 1, 2),),
        faults=faults,
        operations=operations,
        control_host="host1",
        rooms=(0, 2, 1),
        slow_load_s=6.0,
    )
    run = Run(scenario)
    gone, back = set[int](), set[int]()

    def on_roster(_before: Roster, after: Roster, _kept: frozenset[int]) -> None:
        back.update(gone.intersection(member.incarnation for member in after.members))
        gone.update(after.left)

    run.plane.on_roster.append(on_roster)
    assert run.judge().broken == []
    assert len(run.faults.happened) == 3 and len(gone) == 1 and not back


def test_an_engine_that_has_loaded_other_weights_has_a_new_drain_time() -> None:
    """Ray's GCS is away when the engine loads them, and is back for the next manager, which undoes
    the update: the engine leaves again."""
    updates = (3.9, 2), (9.3, 1), (10.8, 0)
    redeploy = Operation(12.0, "redeploy", 2)
    scenario = Scenario(
        seed=0,
        engines=2,
        ingresses=1,
        expert=False,
        requests=(Request(7.8, 0, (31,), 176, 5),),
        faults=(Fault("gcs-away", 10.1, time_s=17.0),),
        operations=(*(Operation(at, "update_weights", number) for at, number in updates), redeploy),
        step_s=SLOW_STEP_S,
        rooms=(0, 2, 1),
    )
    run = Run(scenario)
    left: list[list[int]] = []
    run.plane.on_detach.append(left.append)
    assert run.judge().broken == []
    assert left.count([1]) == 3, "the engine left for each update, and for the one that is undone"


def test_a_drain_is_extended_while_no_coordinator_can_mark_its_engine() -> None:
    """A manager continues the drain of an engine that reloads, and the coordinator terminates
    before the manager can tell it."""
    faults = (
        Fault("kill-control", 6.04325292123336, 2),
        Fault("kill-control", 10.53913336246946, 2),
        Fault("kill-control", 18.736008414825385, 2),
        Fault("second-manager", 18.705497921032677, 2, 0.08026400499391509),
    )
    operations = (
        Operation(3.8543515007920828, "scale", 1),
        Operation(8.909000412767293, "update_weights", 1),
        Operation(9.440947270902376, "update_weights", 2),
        Operation(12.066384690022616, "scale", 3),
    )
    requests = (
        Request(9.33698455359115, 0, (31,), 1, 6),
        Request(11.941386260277014, 1, (22,), 284, 3),
    )
    scenario = Scenario(
        seed=7183,
        engines=3,
        ingresses=2,
        expert=False,
        requests=requests,
        faults=faults,
        operations=operations,
        control_host="host0",
        step_s=SLOW_STEP_S,
        rooms=(0, 1, 2),
    )
    run = Run(scenario)
    assert run.judge().broken == []
    assert [line.split()[1] for line in run.faults.happened][-3:] == [
        "second-manager",
        "kill-control",
        "kill-control",
    ]


def test_an_engine_that_is_being_detached_gets_no_more_time() -> None:
    """The engine hangs, so its group does not continue without it. Then the operator requests
    another size, and both the manager and the coordinator are lost."""
    faults = (
        Fault("hang", 4.2605, 2, changing=True),
        Fault("kill-control", 24.3, 8),
    )
    scenario = Scenario(
        seed=6110201,
        engines=2,
        ingresses=2,
        expert=True,
        requests=(Request(4.202982090207186, 0, (9,), 2, 3),),
        faults=faults,
        operations=(Operation(4.2248, "scale", 1), Operation(14.0935, "scale", 2)),
        control_host="host2",
        step_s=SLOW_STEP_S,
        rooms=(1, 1, 2),
    )
    run = Run(scenario)
    left: list[float] = []
    run.plane.on_detach.append(lambda ranks: left.append(run.plane.kernel.now))
    assert run.judge().broken == []
    assert len(run.plane.coordinators) == 2 and 24.3 < left[-1] < 28.0
