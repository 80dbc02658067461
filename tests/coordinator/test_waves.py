"""The races of waves, one by one. Every story must come to rest: nobody waits, no work is left."""

from __future__ import annotations

import pytest

from swell.coordinator.waves import GroupState, Phase, WaveCoordinator, WaveMember
from swell.coordinator.wire import (
    Pause,
    ReconfigureDistributedRequest,
    Resume,
    StartDPWave,
    StartWave,
)
from tests.coordinator.model_checker import E1, K1, K2, S2, Scenario
from tests.coordinator.model_state import Bounds, EngineState
from tests.coordinator.model_transitions import is_quiescent

AWAKE = ("0 gets a request", "0 is heard", "1 takes")
"""Both engines run."""
PAUSED = ("pause", "0 takes", "1 takes", "0 submits", "1 submits", "0 reads", "1 reads")
"""Both engines are paused behind one step; what they said is under way."""

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
"""How a group of two gets into each state."""


def test_a_stopped_engine_with_work_runs_first_and_then_tells() -> None:
    story = Scenario(Bounds(2, 1, (K1,))).tell("0 gets a request")
    assert story.phases() == [Phase.RUNNING, Phase.STOPPED]
    story.tell("0 is heard", "1 takes")
    assert story.phases() == [Phase.RUNNING, Phase.RUNNING]
    story.rest()


def test_the_first_wave_starts_although_its_number_is_that_of_everybody() -> None:
    story = Scenario(Bounds(2, 2, (K1,)))
    story.tell("1 gets a request", "1 is heard").rest()
    assert [engine.fields.wave for engine in story.state.engines] == [1, 1]


def test_two_engines_woken_at_once_make_one_wave() -> None:
    story = Scenario(Bounds(2, 1, (K1, K1)))
    story.tell("0 gets a request", "1 gets a request", "1 is heard", "0 is heard").rest()
    assert [engine.fields.wave for engine in story.state.engines] == [1, 1]


def test_the_next_start_may_overtake_the_end_of_a_wave() -> None:
    story = Scenario(Bounds(2, 1, (K1, K1))).tell(*AWAKE, "0 submits", "1 submits")
    story.tell("0 reads", "1 reads", "1 gets a request", "1 is heard")
    assert WaveCoordinator(*(story.state.coordinator or ())).wave == 1
    story.tell("0 is heard")
    assert WaveCoordinator(*(story.state.coordinator or ())).running
    story.rest()


def test_a_start_is_remembered_by_an_engine_that_has_yet_to_end_the_wave_before() -> None:
    story = Scenario(Bounds(2, 1, (K1, K1))).tell(*AWAKE, "0 submits", "1 submits")
    story.tell("0 reads", "0 is heard", "0 gets a request", "0 is heard", "1 takes", "1 reads")
    assert story.phases() == [Phase.RUNNING, Phase.RUNNING]
    story.rest()


def test_a_start_that_comes_after_its_wave_is_ignored() -> None:
    story = Scenario(Bounds(2, 1, (K1, K1)))
    story.tell("0 gets a request", "0 is heard", "1 gets a request", "0 submits", "1 submits")
    story.tell("0 reads", "1 takes", "1 reads", "1 is heard")
    assert story.phases() == [Phase.STOPPED, Phase.STOPPED]
    assert story.rest()


def test_a_request_of_a_paused_engine_waits() -> None:
    story = Scenario(Bounds(2, 1, (K1,), pauses=1)).tell(*PAUSED, "1 gets a request")
    assert story.rest().engines[1].jobs
    assert story.tell("resume").rest().engines[1].jobs == ()


def test_a_start_that_comes_after_a_pause_is_ignored() -> None:
    member = WaveMember(1, 0, 1, epoch=1, phase=Phase.PAUSED, ranks=(0, 1))
    member.start(StartDPWave(1, 5))
    assert member.phase is Phase.PAUSED and not member.again


def test_one_may_resume_long_before_another() -> None:
    story = Scenario(Bounds(2, 1, (K2,), pauses=1)).tell(*PAUSED)
    story.tell(*["0 is heard"] * 2, *["1 is heard"] * 2, "resume", "1 takes")
    story.tell("1 takes", "1 submits")
    assert story.phases() == [Phase.PAUSED, Phase.RUNNING]
    story.rest()


def test_a_pause_that_is_released_early_is_agreed_before_it_ends() -> None:
    story = Scenario(Bounds(2, 1, (), pauses=1)).tell("pause", "0 takes", "resume")
    assert all(message[0] is not Resume for message in story.state.engines[0].inbox)
    story.rest()


def test_work_that_cannot_be_scheduled_keeps_the_wave_alive() -> None:
    story = Scenario(Bounds(2, 2, (S2,))).tell(*AWAKE)
    story.tell("0 submits", "0 submits", "1 submits", "1 submits", "0 reads")
    (group,) = story.state.groups
    assert [step.works for step in group.logs[0]] == [True, True]
    assert group.logs[0][1].rows == ()
    story.rest()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_end_that_is_seen_late_costs_no_more_steps_than_are_in_flight(depth: int) -> None:
    story = Scenario(Bounds(2, depth, (E1,)))
    story.tell("0 gets a request").rest()
    assert story.world.most_quiet <= depth


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_may_die_in_each_state(state: str, rank: int) -> None:
    story = Scenario(Bounds(2, 1, (K1,), pauses=1, deaths=1)).tell(*STATES[state], f"{rank} dies")
    assert story.rest().desired == {1 - rank}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_may_lose_a_worker_in_each_state(state: str, rank: int) -> None:
    story = Scenario(Bounds(2, 1, (K1,), pauses=1, losses=1)).tell(*STATES[state])
    story.tell(f"{rank} loses a worker")
    assert all(engine.place is EngineState.INSIDE for engine in story.rest().engines)


@pytest.mark.parametrize("state", STATES)
def test_a_newcomer_may_join_in_each_state(state: str) -> None:
    story = Scenario(Bounds(2, 1, (K1,), newcomers=1, pauses=1)).tell(*STATES[state], "2 is wanted")
    assert [engine.fields.ranks for engine in story.rest().engines] == [(0, 1, 2)] * 3


@pytest.mark.parametrize("state", STATES)
def test_an_engine_may_detach_in_each_state(state: str) -> None:
    story = Scenario(Bounds(2, 1, (K1,), parts=1, pauses=1)).tell(*STATES[state], "1 is to part")
    assert story.rest().engines[1].place is EngineState.OUTSIDE


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("fate", ["too", "arrive"])
def test_the_coordinator_may_die_in_each_state(state: str, fate: str) -> None:
    words = {"too": "its words too", "arrive": "its words arrive"}[fate]
    story = Scenario(Bounds(2, 1, (K1,), pauses=1, restarts=1, reports=True)).tell(*STATES[state])
    before = story.state.engines[0].fields.epoch
    story.tell(f"the coordinator dies, {words}")
    assert story.rest().engines[0].fields.epoch > before


# -------------------------------------------------------------------- what saves words, or time


def test_a_wave_is_told_once() -> None:
    coordinator = WaveCoordinator(epoch=1, ranks=(0, 1, 2), target_ranks=(0, 1, 2))
    assert [rank for rank, _ in coordinator.start_wave(1, 1, 0)] == [0, 2]
    assert coordinator.start_wave(2, 1, 0) == []


def test_a_group_that_is_already_wanted_is_not_disturbed() -> None:
    coordinator = WaveCoordinator(epoch=1, ranks=(0, 1), target_ranks=(0, 1))
    assert coordinator.change((0, 1)) == []
    assert coordinator.change((0, 1), lost=True) == []
    assert coordinator.group_state is GroupState.SERVING


def test_only_the_first_says_that_a_wave_has_ended() -> None:
    for rank, said in [(0, 1), (1, 0)]:
        member = WaveMember(rank, 0, 1, epoch=1, phase=Phase.RUNNING, ranks=(0, 1))
        member.submitted()
        assert len(member.on_all_reduce(0, 0, has_work=False)) == said


def test_a_group_whose_end_several_engines_tell_is_formed_once() -> None:
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


def test_what_arrives_while_the_last_steps_are_read_begins_the_next_wave() -> None:
    member = WaveMember(0, 0, 2, epoch=1, phase=Phase.RUNNING, ranks=(0, 1))
    member.submitted()
    member.submitted()
    assert member.on_all_reduce(0, 0, has_work=False) == [] and not member.may_submit()
    assert member.on_all_reduce(0, 0, has_work=True)[-1] == StartWave(0, 0, 1, 1)
    assert member.may_submit()


def test_an_unfinished_scenario_is_not_quiescent() -> None:
    bounds = Bounds(2, 1, (K1,))
    assert is_quiescent(Scenario(bounds).state, bounds)
    assert not is_quiescent(Scenario(bounds).tell("0 gets a request").state, bounds)
