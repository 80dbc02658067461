"""The races of the wave protocol, one by one. Every scenario must become quiescent: no engine
waits, no work is left."""

from __future__ import annotations

import pytest

from swell.coordinator.wave_protocol.wave_interface import GroupState, Phase
from swell.coordinator.wave_protocol.waves import WaveCoordinator, WaveMember
from swell.coordinator.wire import (
    Pause,
    ReconfigureDistributedRequest,
    Resume,
    StartDPWave,
    StartWave,
)
from tests.coordinator.wave_protocol.model_checker import E1, K1, K2, S2, Scenario
from tests.coordinator.wave_protocol.model_state import Bounds, EngineState
from tests.coordinator.wave_protocol.model_transitions import is_quiescent

AWAKE = ("0 gets a request", "0 is delivered", "1 takes")
"""Both engines run."""
PAUSED = ("pause", "0 takes", "1 takes", "0 submits", "1 submits", "0 reads", "1 reads")
"""Both engines are paused after one step; their messages are in transit."""

STATES = {
    "stopped": (),
    "running alone": ("0 gets a request", "0 submits"),
    "running": (*AWAKE, "0 submits", "1 submits"),
    "ending": (*AWAKE, "0 submits", "1 submits", "0 reads"),
    "asked to pause": ("pause",),
    "voting": ("pause", "0 takes", "0 submits"),
    "half paused": (*PAUSED[:-1],),
    "paused": PAUSED,
}
"""The moves that bring a group of two into each state."""


def test_a_stopped_engine_with_work_runs_first_and_then_reports() -> None:
    scenario = Scenario(Bounds(2, 1, (K1,))).perform("0 gets a request")
    assert scenario.phases() == [Phase.RUNNING, Phase.STOPPED]
    scenario.perform("0 is delivered", "1 takes")
    assert scenario.phases() == [Phase.RUNNING, Phase.RUNNING]
    scenario.rest()


@pytest.mark.parametrize(
    ("ranks", "phase", "needs"),
    [
        ((0, 1), Phase.RUNNING, False),
        ((0, 1), Phase.STOPPED, True),
        ((0,), Phase.STOPPED, False),
        ((0,), Phase.PAUSED, True),
        ((0,), Phase.OUT, True),
        ((0,), Phase.FORMING, True),
        ((), Phase.OUT, True),
    ],
)
def test_an_engine_that_cannot_start_a_wave_asks_the_coordinator(ranks, phase, needs) -> None:
    member = WaveMember(0, 1, 1, phase=phase, ranks=ranks)
    assert member.needs_coordinator == needs


def test_the_first_wave_starts_although_all_engines_have_its_number() -> None:
    scenario = Scenario(Bounds(2, 2, (K1,)))
    scenario.perform("1 gets a request", "1 is delivered").rest()
    assert [engine.fields.wave for engine in scenario.state.engines] == [1, 1]


def test_two_engines_woken_together_start_one_wave() -> None:
    scenario = Scenario(Bounds(2, 1, (K1, K1)))
    scenario.perform(
        "0 gets a request", "1 gets a request", "1 is delivered", "0 is delivered"
    ).rest()
    assert [engine.fields.wave for engine in scenario.state.engines] == [1, 1]


def test_the_next_start_may_overtake_the_end_of_a_wave() -> None:
    scenario = Scenario(Bounds(2, 1, (K1, K1))).perform(*AWAKE, "0 submits", "1 submits")
    scenario.perform("0 reads", "1 reads", "1 gets a request", "1 is delivered")
    assert WaveCoordinator(*(scenario.state.coordinator or ())).wave == 1
    scenario.perform("0 is delivered")
    assert WaveCoordinator(*(scenario.state.coordinator or ())).running
    scenario.rest()


def test_an_engine_in_the_previous_wave_remembers_a_start() -> None:
    scenario = Scenario(Bounds(2, 1, (K1, K1))).perform(*AWAKE, "0 submits", "1 submits")
    scenario.perform(
        "0 reads", "0 is delivered", "0 gets a request", "0 is delivered", "1 takes", "1 reads"
    )
    assert scenario.phases() == [Phase.RUNNING, Phase.RUNNING]
    scenario.rest()


def test_a_start_that_arrives_after_its_wave_is_ignored() -> None:
    scenario = Scenario(Bounds(2, 1, (K1, K1)))
    scenario.perform(
        "0 gets a request", "0 is delivered", "1 gets a request", "0 submits", "1 submits"
    )
    scenario.perform("0 reads", "1 takes", "1 reads", "1 is delivered")
    assert scenario.phases() == [Phase.STOPPED, Phase.STOPPED]
    assert scenario.rest()


def test_a_request_of_a_paused_engine_waits() -> None:
    scenario = Scenario(Bounds(2, 1, (K1,), pauses=1)).perform(*PAUSED, "1 gets a request")
    assert scenario.rest().engines[1].jobs
    assert scenario.perform("resume").rest().engines[1].jobs == ()


def test_a_start_that_arrives_after_a_pause_is_ignored() -> None:
    member = WaveMember(1, 0, 1, epoch=1, phase=Phase.PAUSED, ranks=(0, 1))
    member.start(StartDPWave(1, 5))
    assert member.phase is Phase.PAUSED and not member.start_pending


def test_engines_may_resume_at_different_times() -> None:
    scenario = Scenario(Bounds(2, 1, (K2,), pauses=1)).perform(*PAUSED)
    scenario.perform(*["0 is delivered"] * 2, *["1 is delivered"] * 2, "resume", "1 takes")
    scenario.perform("1 takes", "1 submits")
    assert scenario.phases() == [Phase.PAUSED, Phase.RUNNING]
    scenario.rest()


def test_an_early_resume_waits_until_the_pause_is_agreed() -> None:
    scenario = Scenario(Bounds(2, 1, (), pauses=1)).perform("pause", "0 takes", "resume")
    assert all(message[0] is not Resume for message in scenario.state.engines[0].inbox)
    scenario.rest()


def test_work_that_cannot_be_scheduled_keeps_the_wave_alive() -> None:
    scenario = Scenario(Bounds(2, 2, (S2,))).perform(*AWAKE)
    scenario.perform("0 submits", "0 submits", "1 submits", "1 submits", "0 reads")
    (group,) = scenario.state.groups
    assert [step.works for step in group.logs[0]] == [True, True]
    assert group.logs[0][1].rows == ()
    scenario.rest()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_late_end_of_a_wave_costs_only_the_steps_in_flight(depth: int) -> None:
    scenario = Scenario(Bounds(2, depth, (E1,)))
    scenario.perform("0 gets a request").rest()
    assert scenario.model.most_quiet <= depth


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_may_die_in_each_state(state: str, rank: int) -> None:
    scenario = Scenario(Bounds(2, 1, (K1,), pauses=1, deaths=1)).perform(
        *STATES[state], f"{rank} dies"
    )
    assert scenario.rest().desired == {1 - rank}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_may_lose_a_worker_in_each_state(state: str, rank: int) -> None:
    scenario = Scenario(Bounds(2, 1, (K1,), pauses=1, losses=1)).perform(*STATES[state])
    scenario.perform(f"{rank} loses a worker")
    assert all(engine.place is EngineState.INSIDE for engine in scenario.rest().engines)


@pytest.mark.parametrize("state", STATES)
def test_a_newcomer_may_join_in_each_state(state: str) -> None:
    scenario = Scenario(Bounds(2, 1, (K1,), newcomers=1, pauses=1)).perform(
        *STATES[state], "2 is wanted"
    )
    assert [engine.fields.ranks for engine in scenario.rest().engines] == [(0, 1, 2)] * 3


@pytest.mark.parametrize("state", STATES)
def test_an_engine_may_detach_in_each_state(state: str) -> None:
    scenario = Scenario(Bounds(2, 1, (K1,), detaches=1, pauses=1)).perform(
        *STATES[state], "1 is to detach"
    )
    assert scenario.rest().engines[1].place is EngineState.OUTSIDE


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("fate", ["too", "arrive"])
def test_the_coordinator_may_die_in_each_state(state: str, fate: str) -> None:
    fates = {"too": "messages are lost", "arrive": "messages arrive"}[fate]
    scenario = Scenario(Bounds(2, 1, (K1,), pauses=1, restarts=1, reports=True)).perform(
        *STATES[state]
    )
    before = scenario.state.engines[0].fields.epoch
    scenario.perform(f"the coordinator dies, {fates}")
    assert scenario.rest().engines[0].fields.epoch > before


# -------------------------------------------------------------------- what saves messages or time


def test_a_wave_is_announced_once() -> None:
    coordinator = WaveCoordinator(epoch=1, ranks=(0, 1, 2), target_ranks=(0, 1, 2))
    assert [rank for rank, _ in coordinator.start_wave(1, 1, 0)] == [0, 2]
    assert coordinator.start_wave(2, 1, 0) == []


def test_a_group_that_already_is_the_target_is_not_disturbed() -> None:
    coordinator = WaveCoordinator(epoch=1, ranks=(0, 1), target_ranks=(0, 1))
    assert coordinator.change((0, 1)) == []
    assert coordinator.change((0, 1), lost=True) == []
    assert coordinator.group_state is GroupState.SERVING


def test_only_the_first_engine_reports_the_end_of_a_wave() -> None:
    for rank, said in [(0, 1), (1, 0)]:
        member = WaveMember(rank, 0, 1, epoch=1, phase=Phase.RUNNING, ranks=(0, 1))
        member.submitted()
        assert len(member.on_all_reduce(0, 0, has_work=False)) == said


def test_a_group_that_several_engines_report_as_broken_is_formed_once() -> None:
    coordinator = WaveCoordinator(epoch=1, ranks=(0, 1), target_ranks=(0, 1))
    assert len(coordinator.broken(1)) == 2
    assert coordinator.broken(1) == []


def test_messages_of_another_epoch_are_dropped() -> None:
    member = WaveMember(0, 0, 1, epoch=2, phase=Phase.STOPPED, ranks=(0, 1))
    for epoch in (1, 3):
        assert member.start(StartDPWave(epoch, 0)) == member.pause(Pause(epoch)) == []
        assert member.phase is Phase.STOPPED and not member.voting
    member.phase = Phase.PAUSED
    member.resume(Resume(1))
    assert member.phase is Phase.PAUSED
    assert not member.reconfigure(ReconfigureDistributedRequest(2, [0, 1]))
    coordinator = WaveCoordinator(epoch=2, ranks=(0, 1), target_ranks=(0, 1))
    assert coordinator.start_wave(0, 1, 9) == coordinator.start_wave(0, 3, 9) == []
    coordinator.wave_complete(1, 9)
    assert coordinator.wave == 0


def test_a_request_during_the_last_steps_starts_the_next_wave() -> None:
    member = WaveMember(0, 0, 2, epoch=1, phase=Phase.RUNNING, ranks=(0, 1))
    member.submitted()
    member.submitted()
    assert member.on_all_reduce(0, 0, has_work=False) == [] and not member.may_submit()
    assert member.on_all_reduce(0, 0, has_work=True)[-1] == StartWave(0, 0, 1, 1)
    assert member.may_submit()


def test_an_unfinished_scenario_is_not_quiescent() -> None:
    bounds = Bounds(2, 1, (K1,))
    assert is_quiescent(Scenario(bounds).state, bounds)
    assert not is_quiescent(Scenario(bounds).perform("0 gets a request").state, bounds)


def test_an_engine_with_a_late_hello_forms_a_newer_group() -> None:
    """An engine that introduces itself after the recovery gets a group of a newer epoch: it would
    ignore a command of its own epoch, which was its predecessor's."""
    waves = WaveCoordinator()
    waves.change((0, 1))
    [(_, command), _] = waves.introduced(1, 7)
    assert isinstance(command, ReconfigureDistributedRequest) and command.epoch == 8
    assert waves.introduced(0, 7) == [], "the group is newer than that"
    for rank in (0, 1):
        waves.joined(rank, 8)
    assert waves.introduced(1, 20) == [], "those that serve go on"
    [(_, command), _] = waves.change((0, 1), lost=True) or waves.broken(8)
    assert isinstance(command, ReconfigureDistributedRequest) and command.epoch == 21


def _broken_member() -> WaveMember:
    member = WaveMember(1, 0, 2, epoch=3, wave=5, phase=Phase.RUNNING, ranks=(0, 1), in_flight=2)
    member.broken("a peer is gone")
    return member


def test_a_standalone_engine_steps_for_its_own_rows_and_reports_no_waves() -> None:
    member = _broken_member()
    assert member.lockstep and not member.may_submit()
    assert member.serve_standalone(3)
    assert (member.phase, member.epoch, member.ranks) == (Phase.STANDALONE, 3, (0, 1))
    assert not member.lockstep and member.may_submit()
    assert member.work_arrived() == []
    member.submitted()
    member.submitted()
    assert not member.may_submit()
    for working in (1, 0):
        assert member.on_all_reduce(working, 0, has_work=False) == []
    assert (member.phase, member.wave, member.in_flight) == (Phase.STANDALONE, 5, 0)


def test_a_standalone_engine_leaves_a_pause() -> None:
    member = WaveMember(
        1, 0, 1, epoch=3, phase=Phase.PAUSED, ranks=(0, 1), voting=True, pause_number=2
    )
    assert member.serve_standalone(3)
    assert (member.phase, member.voting, member.pause_number) == (Phase.STANDALONE, False, 0)
    assert member.resume(Resume(3)) == [] and member.phase is Phase.STANDALONE


def test_only_an_engine_of_a_group_that_does_not_step_becomes_standalone() -> None:
    assert not _broken_member().serve_standalone(2), "an older group"
    assert not WaveMember(1, 0, 1, epoch=3, phase=Phase.RUNNING, ranks=(0, 1)).serve_standalone(3)
    assert not WaveMember(1, 0, 1, epoch=3, phase=Phase.OUT, ranks=(0,)).serve_standalone(3), (
        "it left"
    )


def test_a_standalone_engine_follows_only_a_newer_group() -> None:
    member = _broken_member()
    assert member.serve_standalone(3)
    for message in (StartDPWave(3, 9), Resume(3)):
        (member.start if isinstance(message, StartDPWave) else member.resume)(message)
    assert member.pause(Pause(3, 1)) == []
    assert (member.phase, member.voting) == (Phase.STANDALONE, False)
    assert not member.reconfigure(ReconfigureDistributedRequest(3, [1]))
    assert member.reconfigure(ReconfigureDistributedRequest(4, [1], 6))
    assert (member.phase, member.epoch, member.lockstep) == (Phase.FORMING, 4, True)


@pytest.mark.parametrize("state", [GroupState.SERVING, GroupState.PAUSING, GroupState.FORMING])
def test_a_coordinator_forms_the_next_group_with_a_standalone_engine(state: GroupState) -> None:
    """The coordinator forms the next group with an engine that computes on its own, also while the
    current group forms, because that engine has given up on it."""
    waves = WaveCoordinator(3, 5, False, state, (0, 1), (0, 1))
    commands = waves.report(1, 3, 5, Phase.STANDALONE, False)
    assert commands == [(rank, ReconfigureDistributedRequest(4, [0, 1], 6)) for rank in (0, 1)]


def test_a_report_reveals_a_group_that_broke_while_it_formed() -> None:
    waves = WaveCoordinator(3, 5, False, GroupState.FORMING, (0, 1), (0, 1))
    assert waves.report(1, 3, 5, Phase.FORMING, False) == [], "it may form yet"
    commands = waves.report(1, 3, 5, Phase.OUT, False)
    assert commands == [(rank, ReconfigureDistributedRequest(4, [0, 1], 6)) for rank in (0, 1)]
    assert waves.broken(3) == [], "its message comes after all"


@pytest.mark.parametrize(
    ("epoch", "phase", "is_told"),
    [
        pytest.param(2, Phase.STOPPED, True, id="waits for the next wave of its group"),
        pytest.param(2, Phase.RUNNING, True, id="is inside a step of its group"),
        pytest.param(2, Phase.STANDALONE, False, id="needs no group"),
        pytest.param(3, Phase.OUT, False, id="has left its group"),
        pytest.param(0, Phase.OUT, False, id="was in no group yet"),
    ],
)
def test_an_engine_that_was_removed_leaves_its_group(epoch, phase, is_told) -> None:
    """The command of the change did not reach it. Its rank may belong to another engine by now."""
    waves = WaveCoordinator(3, 5, ranks=(0, 1), target_ranks=(0, 1), number=9)
    command = waves.left_out(epoch, phase)
    assert command == (ReconfigureDistributedRequest(3, [], 5, coordinator=9) if is_told else None)
    if command is not None:
        member = WaveMember(1, 1, 1, epoch=epoch, phase=phase, ranks=(0, 1))
        assert member.reconfigure(command) and member.phase is Phase.OUT
        assert member.ranks == (), "it does not wait for the others of its old group"
