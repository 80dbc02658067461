"""The coordinator's decisions on roster, group and liveness, without sockets or a clock."""

from __future__ import annotations

import msgspec
import pytest

from swell.configs.lora import Adapter
from swell.configs.schema import load
from swell.coordinator.manager_state import DesiredState, ManagerState
from swell.coordinator.roster import Member, MemberState
from swell.coordinator.state_machine import MAX_STALLED, CoordinatorStateMachine
from swell.coordinator.wave_protocol.null_waves import NullCoordinator
from swell.coordinator.wave_protocol.wave_interface import GroupState, Phase
from swell.coordinator.wave_protocol.waves import WaveCoordinator
from swell.coordinator.wire import (
    Broken,
    ClusterReports,
    ClusterView,
    EngineHello,
    EngineReport,
    Introduce,
    Joined,
    Pause,
    Paused,
    ReconfigureDistributedRequest,
    Repaired,
    Resume,
)
from tests.coordinator.test_roster import member as plain

CONFIG = load({"model": {"path": "m"}, "cluster": {"stall_timeout_s": 4.0}}).cluster


def member(rank: int, incarnation: int = 7) -> Member:
    return msgspec.structs.replace(plain(rank), incarnation=incarnation, store=("h", 100 + rank))


@pytest.fixture
def dense() -> CoordinatorStateMachine:
    return CoordinatorStateMachine(CONFIG, NullCoordinator(), 0.0)


@pytest.fixture
def lockstep() -> CoordinatorStateMachine:
    return CoordinatorStateMachine(CONFIG, WaveCoordinator(), 0.0)


def form(state_machine: CoordinatorStateMachine, now: float = 0.0) -> None:
    """Lets every engine of the forming group join it."""
    for rank in state_machine.waves.ranks:
        found = state_machine.current_member(rank)
        assert found is not None
        state_machine.on_message(Joined(rank, found.incarnation, state_machine.waves.epoch), now)


def states(state_machine: CoordinatorStateMachine) -> dict[int, MemberState]:
    return {m.rank: m.state for m in state_machine.roster.members}


def test_dense_engines_join_and_detach_at_once(dense) -> None:
    assert dense.join([member(0), member(1)], 0.0) == []
    assert dense.roster.ranks == [0, 1]
    assert dense.detach([0], 0.0) == []
    assert dense.roster.ranks == [1]


def test_an_occupied_rank_is_refused_and_its_own_engine_may_rejoin(dense) -> None:
    dense.join([member(0)], 0.0)
    dense.join([member(0)], 0.0)
    with pytest.raises(ValueError, match="rank 0"):
        dense.join([member(0, incarnation=8)], 0.0)
    assert dense.roster.epoch == 1


def test_messages_of_removed_engines_are_ignored(dense) -> None:
    """Reports of a dead engine are ignored, also after another engine has taken its rank."""
    dense.join([member(0, 7)], 0.0)
    dense.remove_failed([0], 0.0)
    dense.on_message(EngineReport(0, 7, steps=5), 0.0)
    assert dense.view().reports.engines == []
    dense.join([member(0, 8)], 0.0)
    dense.on_message(EngineReport(0, 7, steps=5), 0.0)
    assert dense.view().reports.engines == []
    dense.on_message(EngineReport(0, 8, steps=6), 0.0)
    assert [report.steps for report in dense.view().reports.engines] == [6]


def test_an_engine_is_in_the_roster_once_its_group_has_formed(lockstep) -> None:
    [(rank, command)] = lockstep.join([member(0)], 0.0)
    assert (rank, command.ranks, command.store) == (0, [0], None)
    assert lockstep.roster.ranks == [] and not lockstep.is_stable
    form(lockstep)
    assert lockstep.roster.ranks == [0] and lockstep.is_stable
    assert lockstep.join([member(1)], 1.0) == [(0, Pause(1, 1))]
    assert lockstep.roster.ranks == [0], "requests would reach it too early"
    sends = lockstep.on_message(Paused(0, 7, 1, 1), 1.0)
    assert [rank for rank, _ in sends] == [0, 1]
    assert all(c.ranks == [0, 1] and c.store == ("h", 100) for _, c in sends)
    assert lockstep.on_message(Joined(0, 7, 2), 1.5) == []
    assert lockstep.on_message(Joined(1, 7, 2), 3.0) == [(0, Resume(2)), (1, Resume(2))]
    assert lockstep.roster.ranks == [0, 1]
    assert lockstep.commit_s == 2.0


def test_an_engine_leaves_the_roster_once_its_group_continues_without_it(lockstep) -> None:
    lockstep.join([member(0), member(1)], 0.0)
    form(lockstep)
    lockstep.leave([1], 0.0)
    assert lockstep.detach([1], 0.0) == [(0, Pause(1, 1)), (1, Pause(1, 1))]
    for rank in (0, 1):
        lockstep.on_message(Paused(rank, 7, 1, 1), 0.0)
    assert states(lockstep) == {0: MemberState.ACTIVE, 1: MemberState.LEAVING}
    form(lockstep)
    assert lockstep.roster.ranks == [0]


@pytest.mark.parametrize("kind", ["dense", "lockstep"])
@pytest.mark.parametrize("is_lost", [True, False])
def test_the_roster_records_whether_a_removed_engine_left(kind, is_lost, request) -> None:
    machine = request.getfixturevalue(kind)
    machine.join([member(0), member(1, incarnation=8)], 0.0)
    form(machine)
    machine.leave([1], 0.0)
    if is_lost:
        machine.remove_failed([1], 0.0)
    else:
        machine.detach([1], 0.0)
        machine.on_message(Paused(0, 7, machine.waves.epoch, 1), 0.0)
        machine.on_message(Paused(1, 8, machine.waves.epoch, 1), 0.0)
    form(machine)
    machine.advance_epoch(50, 0.0)
    assert machine.roster.ranks == [0] and machine.roster.epoch == 51
    assert machine.roster.left == (() if is_lost else (8,))


def test_a_detached_engine_that_dies_first_counts_as_lost(lockstep) -> None:
    lockstep.join([member(0), member(1)], 0.0)
    form(lockstep)
    lockstep.leave([1], 0.0)
    lockstep.detach([1], 0.0)
    lockstep.remove_failed([1], 0.0)
    form(lockstep)
    assert lockstep.roster.ranks == [0] and lockstep.roster.left == ()


def test_an_engine_that_waits_for_a_pause_is_not_reported_as_stalled(lockstep) -> None:
    """An engine that waits for the group to pause makes no progress and is not blamed. A new
    coordinator adopts a group with a hanging engine and a newcomer that has a request."""
    group, outside = member(0), member(1)
    hellos = [
        EngineHello(group, epoch=1, ranks=[0], phase=Phase.RUNNING),
        EngineHello(outside),
    ]
    lockstep.recover(1, hellos, 0.0)
    assert lockstep.waves.group_state is GroupState.PAUSING
    for second in range(1, 11):
        stepping = EngineReport(0, 7, 1, progress_counter=9, wave_phase=Phase.RUNNING)
        lockstep.on_message(stepping, float(second))
        lockstep.on_message(EngineReport(1, 7, waiting=1), float(second))
        lockstep.tick(float(second))
    assert [stalled.rank for stalled in lockstep.stalled_engines] == [0]
    assert lockstep.waves.ranks == (1,)


@pytest.mark.parametrize("kind", ["dense", "lockstep"])
@pytest.mark.parametrize("leaves_first", [True, False])
@pytest.mark.parametrize("is_kept", [True, False])
def test_an_engine_that_leaves_and_replaces_a_worker_stays_until_it_has_finished(
    kind, leaves_first, is_kept, request
) -> None:
    machine = request.getfixturevalue(kind)
    machine.join([member(0), member(1)], 0.0)
    form(machine)

    def lose_worker() -> None:
        broken = Broken(1, 7, machine.waves.epoch, "a worker died", repairing=True)
        machine.on_message(broken, 0.0)
        form(machine)

    steps = [lambda: machine.leave([1], 0.0), lose_worker]
    for step in steps if leaves_first else steps[::-1]:
        step()
    assert states(machine) == {0: MemberState.ACTIVE, 1: MemberState.REPAIRING}
    if is_kept:
        machine.cancel_leave([1], 0.0)
        assert states(machine)[1] is MemberState.REPAIRING
    machine.on_message(Repaired(1, 7, ("h", 101)), 0.0)
    pause_number = getattr(machine.waves, "pause_number", 0)
    for rank in (0, 1):
        machine.on_message(Paused(rank, 7, machine.waves.epoch, pause_number), 0.0)
    form(machine)
    after = MemberState.ACTIVE if is_kept else MemberState.LEAVING
    assert states(machine) == {0: MemberState.ACTIVE, 1: after}
    assert machine.roster.left == ()


@pytest.mark.parametrize("kind", ["dense", "lockstep"])
def test_a_repairing_engine_may_be_removed(kind, request) -> None:
    machine = request.getfixturevalue(kind)
    machine.join([member(0), member(1, 8)], 0.0)
    form(machine)
    machine.leave([1], 0.0)
    machine.on_message(Broken(1, 8, machine.waves.epoch, "a worker died", repairing=True), 0.0)
    form(machine)
    machine.detach([1], 0.0)
    form(machine)
    assert machine.roster.ranks == [0] and machine.roster.left == (8,)


def test_a_silent_leaving_engine_is_detached_with_another_silent_one(lockstep) -> None:
    """Two engines fall silent, and one of them is leaving. The group continues without the first
    one, so the leaving one is detached too, and no engine is left."""
    lockstep.join([member(0), member(1)], 0.0)
    form(lockstep)
    lockstep.leave([1], 0.0)
    lockstep.detach([1], 0.0)
    for now in range(20):
        lockstep.tick(float(now))
    assert lockstep.roster.ranks == [] and lockstep.detached == set()
    assert [stalled.rank for stalled in lockstep.stalled_engines] == [0]
    assert lockstep.roster.left == (member(1).incarnation,)


@pytest.mark.parametrize("kind", ["dense", "lockstep"])
def test_a_removed_engine_cannot_be_kept(kind, request) -> None:
    """An engine that is gone is not kept, although the manager detaches it and then wants it again;
    the other engines continue."""
    machine = request.getfixturevalue(kind)
    machine.join([member(0), member(1), member(2)], 0.0)
    form(machine)
    machine.remove_failed([0], 1.0)
    form(machine)
    machine.detach([0], 1.0)
    assert machine.detached == set()
    machine.cancel_leave([0], 1.0)
    assert machine.waves.target_ranks == (1, 2)


def test_repairs_of_a_removed_engine_do_not_count_for_its_successor(lockstep) -> None:
    lockstep.join([member(0)], 0.0)
    form(lockstep)
    lockstep.on_message(EngineReport(0, 7, epoch=1, repairs=3), 0.0)
    lockstep.remove_failed([0], 0.0)
    lockstep.join([member(0, 8)], 0.0)
    form(lockstep)
    lockstep.on_message(Broken(0, 8, lockstep.waves.epoch, "a worker died", True), 0.0)
    assert states(lockstep) == {0: MemberState.REPAIRING}
    report = EngineReport(0, 8, epoch=lockstep.waves.epoch, repairs=1)
    assert lockstep.on_message(report, 0.0) == [(0, Introduce())], "its `Repaired` was lost"


def test_a_detached_engine_is_removed_although_it_was_repaired(lockstep) -> None:
    lockstep.join([member(0), member(1)], 0.0)
    form(lockstep)
    lockstep.leave([1], 1.0)
    broken = Broken(1, 7, lockstep.waves.epoch, "worker 3 died", repairing=True)
    lockstep.on_message(broken, 1.0)
    lockstep.detach([1], 1.0)
    lockstep.on_message(Repaired(1, 7, ("h", 200)), 2.0)
    form(lockstep)
    assert lockstep.roster.ranks == [0] and lockstep.is_stable


def test_a_detached_engine_that_is_kept_stays_in_the_group(lockstep) -> None:
    lockstep.join([member(0), member(1)], 0.0)
    form(lockstep)
    lockstep.leave([1], 1.0)
    lockstep.detach([1], 1.0)
    lockstep.cancel_leave([1], 1.0)
    for rank in lockstep.waves.ranks:
        epoch, number = lockstep.waves.epoch, lockstep.waves.pause_number
        lockstep.on_message(Paused(rank, 7, epoch, number), 1.0)
    form(lockstep)
    assert states(lockstep) == {0: MemberState.ACTIVE, 1: MemberState.ACTIVE}


def test_a_dead_engine_is_removed_at_once_and_the_others_regroup(lockstep) -> None:
    lockstep.join([member(0), member(1)], 0.0)
    form(lockstep)
    sends = lockstep.remove_failed([0], 0.0)
    assert lockstep.roster.ranks == [1]
    commands = {rank: c for rank, c in sends if isinstance(c, ReconfigureDistributedRequest)}
    assert commands[1].ranks == [1] and commands[1].store is None


def test_a_newcomer_that_dies_while_forming_leaves_the_group_as_it_was(lockstep) -> None:
    lockstep.join([member(0)], 0.0)
    form(lockstep)
    lockstep.join([member(1)], 0.0)
    lockstep.on_message(Paused(0, 7, 1, 1), 0.0)
    lockstep.remove_failed([1], 0.0)
    form(lockstep)
    assert lockstep.roster.ranks == [0] and lockstep.is_stable


@pytest.mark.parametrize("kind", ["dense", "lockstep"])
def test_a_repairing_engine_stays_and_is_active_again(kind, request) -> None:
    state_machine = request.getfixturevalue(kind)
    state_machine.join([member(0), member(1)], 0.0)
    form(state_machine)
    state_machine.on_message(
        Broken(1, 7, state_machine.waves.epoch, "worker 0 died", repairing=True), 0.0
    )
    form(state_machine)
    assert states(state_machine) == {0: MemberState.ACTIVE, 1: MemberState.REPAIRING}
    state_machine.on_message(Repaired(1, 7, ("other", 5)), 0.0)
    state_machine.on_message(Paused(0, 7, state_machine.waves.epoch, 1), 0.0)
    form(state_machine)
    assert states(state_machine) == {0: MemberState.ACTIVE, 1: MemberState.ACTIVE}
    found = state_machine.current_member(1)
    assert found is not None and found.store == ("other", 5)


@pytest.mark.parametrize("kind", ["dense", "lockstep"])
@pytest.mark.parametrize("leaves", [False, True])
def test_a_report_reveals_a_repair_whose_message_was_lost(kind, leaves, request) -> None:
    """A connection that broke loses `Broken`, and a coordinator that recovers drops it."""
    state_machine = request.getfixturevalue(kind)
    state_machine.join([member(0), member(1)], 0.0)
    form(state_machine)
    if leaves:
        state_machine.leave([1], 0.0)
    report = EngineReport(1, 7, epoch=state_machine.waves.epoch, wave_phase=int(Phase.OUT))
    state_machine.on_message(msgspec.structs.replace(report, is_repairing=True), 1.0)
    form(state_machine)
    found = state_machine.current_member(1)
    assert found is not None
    assert (found.state, found.leaves) == (MemberState.REPAIRING, leaves)
    assert states(state_machine)[0] is MemberState.ACTIVE
    assert 1 not in state_machine.waves.target_ranks
    state_machine.on_message(Repaired(1, 7, ("other", 5)), 2.0)
    state_machine.on_message(Paused(0, 7, state_machine.waves.epoch, 1), 2.0)
    form(state_machine)
    assert states(state_machine)[1] is (MemberState.LEAVING if leaves else MemberState.ACTIVE)


@pytest.mark.parametrize("kind", ["dense", "lockstep"])
def test_an_engine_whose_repaired_message_was_lost_is_asked(kind, request) -> None:
    state_machine = request.getfixturevalue(kind)
    state_machine.join([member(0), member(1)], 0.0)
    form(state_machine)
    state_machine.on_message(EngineReport(1, 7, epoch=state_machine.waves.epoch, repairs=2), 0.0)
    epoch = state_machine.waves.epoch
    state_machine.on_message(Broken(1, 7, epoch, "worker 0 died", repairing=True), 0.0)
    form(state_machine)
    out = int(Phase.OUT)
    assert not state_machine.on_message(EngineReport(1, 7, wave_phase=out, repairs=2), 1.0)
    sends = state_machine.on_message(EngineReport(1, 7, wave_phase=out, repairs=3), 2.0)
    assert sends == [(1, Introduce())]
    back = msgspec.structs.replace(member(1), store=("other", 5))
    state_machine.introduced(EngineHello(back), 2.0)
    state_machine.on_message(Paused(0, 7, state_machine.waves.epoch, 1), 2.0)
    form(state_machine)
    assert states(state_machine) == {0: MemberState.ACTIVE, 1: MemberState.ACTIVE}
    found = state_machine.current_member(1)
    assert found is not None and found.store == ("other", 5)
    assert not state_machine.on_message(EngineReport(1, 7, repairs=3), 3.0)


def test_the_only_engine_may_repair_too(lockstep) -> None:
    lockstep.join([member(0)], 0.0)
    form(lockstep)
    lockstep.on_message(Broken(0, 7, 1, "worker 1 died", repairing=True), 0.0)
    assert states(lockstep) == {0: MemberState.REPAIRING}
    sends = lockstep.on_message(Repaired(0, 7, ("h", 1)), 0.0)
    assert [c.ranks for _, c in sends] == [[0]]
    form(lockstep)
    assert states(lockstep) == {0: MemberState.ACTIVE}


def test_a_silent_engine_is_removed_and_reported(dense) -> None:
    dense.join([member(0), member(1)], 0.0)
    dense.on_message(EngineReport(1, 7), 0.0)
    for tenth in range(100):
        now = tenth / 10
        dense.on_message(EngineReport(0, 7), now)
        dense.tick(now)
    assert dense.roster.ranks == [0]
    [stalled] = dense.stalled_engines
    assert (stalled.rank, stalled.incarnation) == (1, 7) and "sent no report" in stalled.reason
    assert dense.view().reports.stalls == 1


def test_only_the_newest_stalled_engines_are_kept(dense) -> None:
    """A cluster runs for months: the count increases, and the list has a bound."""
    starts = MAX_STALLED + 5
    for start in range(starts):
        dense.join([member(0, start)], 100.0 * start)
        for second in range(20):
            dense.tick(100.0 * start + second)
        assert dense.roster.ranks == []
    assert dense.view().reports.stalls == starts
    kept = [stalled.incarnation for stalled in dense.stalled_engines]
    assert kept == [*range(starts - MAX_STALLED, starts)]


def test_an_operator_pauses_and_resumes(dense) -> None:
    dense.join([member(0)], 0.0)
    assert dense.pause(0.0) == [(0, Pause(0))]
    assert dense.view().reports.state == "paused"
    idle, paused = (
        EngineReport(0, 7, wave_phase=int(Phase.RUNNING)),
        EngineReport(0, 7, wave_phase=3),
    )
    assert dense.on_message(idle, 0.0) == [(0, Pause(0))], "who did not hear it is commands again"
    assert dense.on_message(paused, 0.0) == []
    assert dense.resume(0.0) == [(0, Resume(0))]
    assert dense.on_message(paused, 0.0) == [(0, Resume(0))]


@pytest.mark.parametrize("kind", ["dense", "lockstep"])
def test_a_successor_takes_over_the_engines_that_report(kind, request) -> None:
    state_machine = request.getfixturevalue(kind)
    hellos = [EngineHello(member(r), 4, [0, 2], 9, int(Phase.STOPPED)) for r in (2, 0)]
    state_machine.recover(11, hellos, 0.0)
    assert state_machine.roster.epoch > 11 and state_machine.roster.ranks == [0, 2]
    for rank in (0, 2):
        state_machine.on_message(Paused(rank, 7, 4, 1), 0.0)
    form(state_machine)
    assert state_machine.roster.ranks == [0, 2] and state_machine.is_stable


@pytest.mark.parametrize("kind", ["dense", "lockstep"])
def test_an_engine_known_to_a_successor_is_lost_when_it_is_silent(kind, request) -> None:
    """An engine that has introduced itself to a new coordinator has no more time than others, even
    before any report."""
    state_machine = request.getfixturevalue(kind)
    state_machine.recover(1, [EngineHello(member(r), 4, [0, 1, 2]) for r in (0, 1)], 0.0)
    late = EngineHello(member(2), 4, [0, 1, 2])
    state_machine.join([late.member], 0.0, unheard={late.member.incarnation})
    state_machine.introduced(late, 1.0)
    for tick in range(30):
        now = tick / 4
        state_machine.on_message(EngineReport(0, 7), now)
        state_machine.tick(now)
    assert [engine.rank for engine in state_machine.stalled_engines] == [1, 2]
    assert state_machine.roster.ranks == [0]


def test_a_newcomer_after_its_hello_has_the_usual_limit(lockstep) -> None:
    """The group forms without a newcomer that has introduced itself but sends no report within the
    limit."""
    for rank in range(2):
        lockstep.join([member(rank)], 0.0)
    for tick in range(30):
        lockstep.on_message(EngineReport(0, 7), tick / 4)
        lockstep.tick(tick / 4)
    assert [engine.rank for engine in lockstep.stalled_engines] == [1]


def test_a_group_does_not_wait_for_an_engine_that_has_not_introduced_itself(lockstep) -> None:
    """Such an engine may follow an earlier coordinator for long: the others step meanwhile. It
    joins their group when it introduces itself, with the epoch that it knows."""
    lockstep.join([member(0)], 0.0)
    form(lockstep)
    assert lockstep.join([member(1)], 1.0, unheard={member(1).incarnation}) == []
    assert lockstep.is_stable and lockstep.joining == {1}
    lockstep.on_message(EngineReport(0, 7, epoch=1, wave_phase=int(Phase.STOPPED)), 2.0)
    assert lockstep.waves.ranks == (0,) and lockstep.roster.ranks == [0]
    hello = EngineHello(member(1), 5, [0, 1])
    lockstep.introduced(msgspec.structs.replace(hello, member=member(1, 6)), 2.0)
    assert lockstep.waves.target_ranks == (0,), "it was an earlier engine of this rank"
    assert lockstep.introduced(hello, 3.0) == [(0, Pause(1, 1))]
    sends = lockstep.on_message(Paused(0, 7, 1, 1), 3.0)
    assert [(rank, command.epoch) for rank, command in sends] == [(0, 6), (1, 6)]
    form(lockstep, 3.0)
    assert lockstep.roster.ranks == [0, 1] and lockstep.joining == set()


def test_another_engine_of_the_rank_joins_instead_of_one_that_sends_no_hello(lockstep) -> None:
    lockstep.join([member(0)], 0.0)
    form(lockstep)
    lockstep.join([member(1)], 0.0, unheard={member(1).incarnation})
    assert lockstep.join([member(1, 8)], 0.0) == [(0, Pause(1, 1))]
    lockstep.on_message(Paused(0, 7, 1, 1), 0.0)
    form(lockstep)
    assert [each.incarnation for each in lockstep.roster.members] == [7, 8]


def test_a_group_does_not_wait_for_a_newcomer_that_replaces_a_worker(lockstep) -> None:
    lockstep.join([member(0)], 0.0)
    form(lockstep)
    lockstep.join([member(1)], 0.0, unheard={member(1).incarnation})
    report = EngineReport(1, 7, wave_phase=int(Phase.OUT), is_repairing=True)
    assert lockstep.on_message(report, 1.0) == []
    assert lockstep.introduced(EngineHello(member(1), 5, [0, 1]), 1.0) == []
    assert lockstep.waves.target_ranks == (0,)
    assert lockstep.on_message(Repaired(1, 7), 2.0) == [(0, Pause(1, 1))]


def test_the_removal_of_an_earlier_engine_of_the_rank_changes_nothing(lockstep) -> None:
    lockstep.join([member(0)], 0.0)
    form(lockstep)
    lockstep.join([member(1)], 0.0)
    lockstep.on_message(Paused(0, 7, 1, 1), 0.0)
    form(lockstep)
    epoch = lockstep.waves.epoch
    lockstep.detach([1], 1.0)
    assert lockstep.waves.group_state is GroupState.PAUSING
    assert lockstep.remove_failed([1], 1.0, incarnations={6}) == []
    assert lockstep.waves.epoch == epoch and lockstep.waves.ranks == (0, 1)


def test_an_engine_that_never_introduces_itself_does_not_join(lockstep) -> None:
    lockstep.join([member(0)], 0.0)
    form(lockstep)
    lockstep.join([member(1)], 0.0, unheard={member(1).incarnation})
    report = EngineReport(0, 7, epoch=1, wave_phase=int(Phase.STOPPED))
    for second in range(14):
        lockstep.on_message(report, float(second))
        lockstep.tick(float(second))
    assert lockstep.joining == set() and lockstep.roster.ranks == [0]
    assert "sent no report" in lockstep.finish_join({1}, 60.0).refused[1]


def test_the_epoch_advances_past_a_reported_one(dense) -> None:
    """The epoch advances past one that was seen: a new coordinator learned its predecessor's epoch
    too late."""
    dense.join([member(0)], 0.0)
    dense.advance_epoch(1, 0.0)
    assert dense.roster.epoch == 1
    dense.advance_epoch(9, 0.0)
    assert (dense.roster.epoch, dense.roster.ranks) == (10, [0])
    assert dense.publisher.due(0.0) is not None, "and it is commands"


def test_the_names_of_adapters_reach_ingresses_without_a_new_roster(dense) -> None:
    dense.join([member(0)], 0.0)
    assert isinstance(dense.publication(1.0), ClusterView)
    assert dense.publication(1.0) is None
    names = (Adapter("one", "/one", "1"),)
    dense.keep_manager_state(ManagerState(DesiredState(adapters=names)))
    assert dense.publication(1.0) is None, "with the next reports, or after load_report_s"
    published = dense.publication(1.0 + CONFIG.load_report_s)
    assert isinstance(published, ClusterReports)
    assert published.adapters == dense.view().reports.adapters == names
