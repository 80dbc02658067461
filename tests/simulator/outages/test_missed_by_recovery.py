"""A restarted coordinator does not hear an engine in time, because its connection delivers nothing,
or delivers late what a cut has held back. The engine joins again."""

from __future__ import annotations

from tests.simulator.laws.laws import Run
from tests.simulator.scenario import SLOW_STEP_S, AtMessage, Fault, Operation, Scenario


def test_an_engine_missed_by_the_recovery_rejoins() -> None:
    faults = (Fault("black-hole", 9.72, 7, 3.5), Fault("kill-control", 10.94))
    operations = Operation(3.35, "scale", 1), Operation(10.22, "scale", 4)
    run = Run(Scenario(761, 3, 2, True, (), faults, operations, step_s=SLOW_STEP_S))
    assert run.judge().broken == []
    hit, *_ = run.faults.happened
    assert "black-hole sim-engine-0" in hit and "host0:20000" in hit, "the link to the coordinator"


def test_an_engine_that_was_cut_off_until_the_recovery_rejoins() -> None:
    """The engine learns only after the recovery that the earlier coordinator has terminated."""
    faults = Fault("cut", 5.924415933411142, 2, 3.259828694138226), Fault("kill-control", 9.0079, 2)
    scenario = Scenario(
        seed=5,
        engines=3,
        ingresses=3,
        expert=False,
        requests=(),
        faults=faults,
        control_host="host1",
        step_s=SLOW_STEP_S,
        rooms=(1, 1, 1),
        prefill_engines=1,
        slow_load_s=6.0,
    )
    run = Run(scenario)
    ranks: list[list[int]] = []
    run.plane.on_roster.append(lambda before, after, kept: ranks.append(after.ranks))
    assert run.judge().broken == []
    assert ranks[-2:] == [[0, 1], [0, 1, 2]]
    assert len(run.plane.engines) == 3


def test_an_engine_that_notices_the_silence_later_than_others_rejoins() -> None:
    """The head starts another coordinator 3 s after the earlier one has terminated, because it did
    not reach its host before. Nor did engine 0: it introduces itself at once, and the recovery ends
    before engine 1 looks for the new coordinator."""
    faults = (
        Fault("half-cut-pair", 3.56, 3, 1.16),
        Fault("cut-pair", 4.64, 9, 23.78),
        Fault("kill-control", 10.12, 7),
    )
    run = Run(Scenario(83000038, 3, 3, True, (), faults, control_host="host2", rooms=(1, 1, 1)))
    ranks: list[list[int]] = []
    run.plane.on_roster.append(lambda before, after, kept: ranks.append(after.ranks))
    assert run.judge().broken == []
    assert [0] in ranks and 1 in ranks[-1]
    assert [each.rank for each in run.plane.engines].count(1) == 1, "nobody has replaced it"


def test_a_coordinator_that_is_stopped_while_it_recovers_finds_all_engines() -> None:
    """The coordinator is stopped when the first engine has introduced itself."""
    faults = (
        Fault("stop-control", 3.84, 4, 3.4, AtMessage("Introduce", 2)),
        Fault("stop-control", 13.43, 8, 10.47),
        Fault("kill-control", 19.36, 4),
    )
    scenario = Scenario(
        seed=7323,
        engines=2,
        ingresses=2,
        expert=False,
        requests=(),
        faults=faults,
        operations=(Operation(12.41, "scale", 3),),
        control_host="host2",
        autoscaled=True,
        rooms=(0, 2, 1),
        slow_load_s=6.0,
    )
    run = Run(scenario)
    assert run.judge().broken == []
    assert "stop-control coordinator" in run.faults.happened[-1]
