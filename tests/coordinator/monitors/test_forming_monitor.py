"""A group that does not form: when the coordinator detects this, and which engine it blames."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swell.configs.schema import load
from swell.coordinator.monitors.forming_monitor import cover
from swell.coordinator.roster import Member
from swell.coordinator.state_machine import CoordinatorStateMachine
from swell.coordinator.wave_protocol.wave_interface import GroupState, Phase
from swell.coordinator.wave_protocol.waves import WaveCoordinator
from swell.coordinator.wire import Broken, EngineReport, Joined, ReconfigureDistributedRequest
from tests.coordinator.test_state_machine import form, member

STALL_TIMEOUT_S = 4.0
CONFIG = load({"model": {"path": "m"}, "cluster": {"stall_timeout_s": STALL_TIMEOUT_S}}).cluster
LIMIT_S = 2 * STALL_TIMEOUT_S
PROBE_S = LIMIT_S / 4
TICK_S = 0.5

Epochs = Callable[[int], int]
"""Maps a rank to the epoch that its engine reports."""


class Cluster:
    """A cluster whose engines report at each tick, and whose groups form when `form` is called."""

    def __init__(self, serving: int) -> None:
        self.now = 0.0
        self.machine = CoordinatorStateMachine(CONFIG, WaveCoordinator(), 0.0)
        self.commands: list[tuple[int, object]] = []
        if serving:
            self.join(range(serving))
            form(self.machine)

    def join(self, ranks: range) -> None:
        """Newcomers join, and the serving engines have paused for them."""
        self.machine.join([member(rank) for rank in ranks], self.now)
        waves = self.machine.waves
        if waves.group_state is GroupState.PAUSING:
            for rank in waves.ranks:
                self.machine._sync_roster(waves.paused(rank, waves.epoch, 1), self.now)

    def run(self, seconds: float, reported: Epochs, progress: Callable[[int], int]) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += TICK_S
            for rank in {*self.machine.roster.ranks, *self.machine.joining}:
                found = self.machine.current_member(rank)
                assert isinstance(found, Member)
                report = EngineReport(
                    rank,
                    found.incarnation,
                    reported(rank),
                    wave_phase=Phase.FORMING,
                    progress_counter=progress(rank),
                )
                self.machine.on_message(report, self.now)
            self.commands += self.machine.tick(self.now)

    @property
    def epoch(self) -> int:
        return self.machine.waves.epoch

    @property
    def forming(self) -> tuple[int, ...]:
        assert self.machine.waves.group_state is GroupState.FORMING
        return self.machine.waves.ranks


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(2)


def test_newcomers_are_removed_and_the_others_form_without_them(cluster) -> None:
    cluster.join(range(2, 3))
    cluster.machine.on_message(Broken(0, 7, cluster.epoch, "no connection"), cluster.now)
    begun = cluster.epoch
    cluster.run(LIMIT_S, lambda _: cluster.epoch, lambda _: 0)
    assert cluster.forming == (0, 1, 2) and cluster.epoch == begun
    cluster.run(2 * TICK_S, lambda _: cluster.epoch, lambda _: 0)
    assert cluster.forming == (0, 1, 2) and cluster.epoch == begun + 1, "a probe"
    cluster.run(PROBE_S + TICK_S, lambda _: cluster.epoch, lambda _: 0)
    assert cluster.forming == (0, 1) and cluster.epoch == begun + 2
    told = [
        (r, m.ranks) for r, m in cluster.commands if isinstance(m, ReconfigureDistributedRequest)
    ]
    assert (0, [0, 1]) in told and (1, [0, 1]) in told
    form(cluster.machine)
    assert cluster.machine.roster.ranks == [0, 1] and cluster.machine.joining == set()
    reason = cluster.machine.called_off[2]
    newcomer, speaker = member(2).address.tcp, member(0).address.tcp
    assert newcomer.removeprefix("tcp://") in reason and speaker.removeprefix("tcp://") in reason
    assert "no connection" in reason


def test_only_the_hanging_newcomer_is_removed(cluster) -> None:
    """Only the newcomer that does not follow the probe is called off; the group continues with the
    other one."""
    cluster.join(range(2, 4))
    hung_at = cluster.epoch
    cluster.run(
        LIMIT_S + PROBE_S + 3 * TICK_S,
        lambda rank: hung_at if rank == 2 else cluster.epoch,
        lambda _: 0,
    )
    assert cluster.forming == (0, 1, 3)
    form(cluster.machine)
    assert cluster.machine.roster.ranks == [0, 1, 3] and list(cluster.machine.called_off) == [2]


@pytest.mark.parametrize("absent", [[2, 3], [3]])
def test_a_newcomer_that_follows_is_not_blamed_for_one_that_hangs(cluster, absent) -> None:
    """The serving engines waited for newcomers when they were aborted. Then one newcomer follows,
    and the other one hangs."""
    cluster.join(range(2, 4))
    hung_at = cluster.epoch
    cluster.run(TICK_S, lambda _: hung_at, lambda _: 0)
    for rank in (0, 1):
        message = Broken(rank, 7, hung_at, "aborted", absent=absent)
        cluster.machine.on_message(message, cluster.now)
    assert cluster.epoch == hung_at + 1
    cluster.run(
        LIMIT_S + PROBE_S + 3 * TICK_S,
        lambda rank: hung_at if rank == 2 else cluster.epoch,
        lambda _: 0,
    )
    assert cluster.forming == (0, 1, 3)
    assert list(cluster.machine.called_off) == [2]


@pytest.mark.parametrize("count", [1, 2])
def test_hanging_newcomers_are_removed_although_no_other_engine_exists(count: int) -> None:
    cluster = Cluster(0)
    cluster.join(range(count))
    hung_at = cluster.epoch
    cluster.run(LIMIT_S + PROBE_S + 3 * TICK_S, lambda _: hung_at, lambda _: 0)
    assert list(cluster.machine.called_off) == list(range(count))
    assert cluster.machine.joining == set() and cluster.machine.waves.ranks == ()


def test_an_unreachable_newcomer_is_removed(cluster) -> None:
    """A newcomer that the others cannot reach is called off, although an aborted engine reports it
    late and with an older epoch."""
    cluster.join(range(2, 5))
    begun = cluster.epoch
    for rank, absent in ((0, [3]), (3, [0, 1]), (4, [3])):
        message = Broken(rank, 7, begun, "no connection", absent=absent)
        cluster.machine.on_message(message, cluster.now)
        cluster.run(TICK_S, lambda _: cluster.epoch, lambda _: 0)
    assert cluster.epoch == begun + 1
    cluster.run(LIMIT_S, lambda _: cluster.epoch, lambda _: 0)
    assert cluster.forming == (0, 1, 2, 4)
    assert list(cluster.machine.called_off) == [3]
    for rank in (0, 1, 3, 4):
        assert member(rank).address.tcp.removeprefix("tcp://") in cluster.machine.called_off[3]
    assert "engine 2" not in cluster.machine.called_off[3]


def test_only_the_unreachable_one_of_the_first_engines_is_removed() -> None:
    cluster = Cluster(0)
    cluster.join(range(3))
    cluster.machine.on_message(Broken(0, 7, cluster.epoch, "late", absent=[1]), cluster.now)
    cluster.machine.on_message(Broken(2, 7, cluster.epoch, "late", absent=[1]), cluster.now)
    cluster.run(LIMIT_S + 2 * TICK_S, lambda _: cluster.epoch, lambda _: 0)
    assert cluster.forming == (0, 2)


@pytest.mark.parametrize(
    ("pairs", "candidates", "chosen"),
    [
        ([], [1, 2], []),
        ([(0, 1)], [2], []),
        ([(0, 1)], [1, 2], [1]),
        ([(1, 2)], [1, 2], [2]),
        ([(0, 1), (0, 2), (1, 2)], [1, 2], [1, 2]),
        ([(0, 1), (1, 2), (1, 3)], [1, 2, 3], [1]),
    ],
)
def test_a_cover_contains_one_end_of_each_pair(pairs, candidates, chosen) -> None:
    assert cover({frozenset(pair) for pair in pairs}, set(candidates)) == set(chosen)


def test_a_removed_newcomer_may_join_again(cluster) -> None:
    cluster.join(range(2, 3))
    cluster.run(LIMIT_S + PROBE_S + 3 * TICK_S, lambda _: cluster.epoch, lambda _: 0)
    form(cluster.machine)
    cluster.join(range(2, 3))
    form(cluster.machine)
    assert cluster.machine.roster.ranks == [0, 1, 2] and cluster.machine.called_off == {}


def test_repeatedly_broken_groups_share_one_deadline(cluster) -> None:
    cluster.join(range(2, 3))
    while cluster.now < LIMIT_S + PROBE_S + 3 * TICK_S:
        cluster.run(TICK_S, lambda _: cluster.epoch, lambda _: 0)
        if len(cluster.forming) == 3:
            cluster.machine.on_message(Joined(0, 7, cluster.epoch), cluster.now)
            cluster.machine.on_message(Broken(1, 7, cluster.epoch, "reset"), cluster.now)
    assert cluster.forming == (0, 1)


def test_arriving_experts_count_as_progress(cluster) -> None:
    cluster.join(range(2, 3))
    cluster.run(5 * LIMIT_S, lambda _: cluster.epoch, lambda rank: int(cluster.now) if rank else 0)
    assert cluster.forming == (0, 1, 2)


def test_an_engine_that_does_not_leave_its_older_group_hangs(cluster) -> None:
    """An engine that does not leave its older group hangs, even if it has served for long; the
    engines that wait for it are not blamed."""
    old = cluster.epoch
    cluster.join(range(2, 3))
    behind = 1
    cluster.run(
        LIMIT_S + 2 * TICK_S, lambda rank: old if rank == behind else cluster.epoch, lambda _: 0
    )
    [stalled] = cluster.machine.stalled_engines
    assert stalled.rank == behind and "did not join the group" in stalled.reason
    assert member(behind).address.tcp.removeprefix("tcp://") in stalled.reason
    assert cluster.forming == (0, 2) and cluster.machine.roster.ranks == [0]


def test_a_member_that_hangs_while_forming_is_found_by_the_probe(cluster) -> None:
    """A serving engine that hangs while the group forms is found by the probe; the newcomer, which
    follows, is not blamed."""
    cluster.join(range(2, 3))
    hung_at = cluster.epoch

    def run(seconds: float) -> None:
        cluster.run(seconds, lambda rank: hung_at if rank == 0 else cluster.epoch, lambda _: 0)

    run(LIMIT_S + LIMIT_S / 2)
    assert cluster.machine.stalled_engines == []
    run(3 * TICK_S)
    assert [stalled.rank for stalled in cluster.machine.stalled_engines] == [0]
    assert cluster.forming == (1, 2) and cluster.machine.called_off == {}


@pytest.mark.parametrize("hangs", [True, False])
def test_an_engine_that_only_the_newcomer_names_may_hang(cluster, hangs: bool) -> None:
    """If the engine that only the newcomer names hangs, the newcomer is not called off. If that
    engine follows the probe, the newcomer is called off."""
    cluster.join(range(2, 3))
    cluster.machine.on_message(Broken(2, 7, cluster.epoch, "aborted", absent=[0]), cluster.now)
    hung_at = cluster.epoch
    cluster.run(
        LIMIT_S + LIMIT_S / 2 + 4 * TICK_S,
        lambda rank: hung_at if rank == 0 and hangs else cluster.epoch,
        lambda _: 0,
    )
    assert [stalled.rank for stalled in cluster.machine.stalled_engines] == [0] * hangs
    assert cluster.forming == ((1, 2) if hangs else (0, 1))
    assert list(cluster.machine.called_off) == [2] * (not hangs)


@pytest.mark.parametrize("joined", [{1, 2, 3}, {1, 2}])
def test_reports_of_an_older_epoch_remove_no_newcomer(cluster, joined: set[int]) -> None:
    """A group broke because one of its engines was lost, so that all waited for all. In the next
    epoch all engines have connected, or none could join. Then an engine that served hangs, and
    perhaps another one waits for it."""
    cluster.join(range(2, 4))
    older = cluster.epoch
    for rank in range(4):
        absent = sorted({0, 1, 2, 3} - {rank})
        broken = Broken(rank, 7, older, "aborted", absent=absent)
        cluster.machine.on_message(broken, cluster.now)
    epoch = cluster.epoch
    for rank in joined:
        cluster.machine.on_message(Joined(rank, 7, epoch), cluster.now)
    assert cluster.machine.waves.acknowledged == joined, "the case under test"
    cluster.run(
        LIMIT_S + LIMIT_S / 2 + 4 * TICK_S,
        lambda rank: cluster.epoch if rank else epoch,
        lambda _: 0,
    )
    assert [stalled.rank for stalled in cluster.machine.stalled_engines] == [0]
    assert cluster.forming == (1, 2, 3) and not cluster.machine.called_off


def test_newcomers_that_name_no_peer_and_have_not_joined_are_removed(cluster) -> None:
    """All newcomers follow the probe, and none names a peer: one of them can connect but cannot
    exchange expert data. The newcomers that have not joined are called off."""
    cluster.join(range(2, 4))
    seen = 0

    def joins(rank: int) -> int:
        nonlocal seen
        if cluster.epoch > seen:
            seen = cluster.epoch
            for other in range(3):
                cluster.machine.on_message(Joined(other, 7, seen), cluster.now)
        return cluster.epoch

    cluster.run(LIMIT_S + PROBE_S + 4 * TICK_S, joins, lambda _: 0)
    assert list(cluster.machine.called_off) == [3] and not cluster.machine.stalled_engines
    assert set(cluster.machine.waves.ranks) == {0, 1, 2}


def test_engines_that_cannot_reach_each_other_try_again(cluster) -> None:
    cluster.machine.on_message(Broken(0, 7, cluster.epoch, "reset"), cluster.now)
    begun = cluster.epoch
    cluster.run(LIMIT_S + 2 * TICK_S, lambda _: cluster.epoch, lambda _: 0)
    assert cluster.forming == (0, 1) and cluster.epoch == begun + 1
    assert cluster.machine.stalled_engines == []


def test_a_group_without_newcomers_forms_without_an_engine_that_is_not_reached() -> None:
    """The link between two hosts is down: the other engines serve without the fewest that must be
    left out. Peers that were absent in a group of other engines are not blamed."""
    cluster = Cluster(4)
    unformed = cluster.epoch
    absent_before = Broken(0, 7, unformed, "aborted", absent=[1, 2, 3])
    cluster.machine.on_message(absent_before, cluster.now)
    cluster.run(TICK_S, lambda _: cluster.epoch, lambda _: 0)
    told = cluster.epoch

    def report(epoch: int) -> None:
        for rank, absent in ((1, [3]), (2, [3]), (3, [1, 2])):
            broken = Broken(rank, 7, epoch, "no connection", absent=absent)
            cluster.machine.on_message(broken, cluster.now)

    report(told)
    cluster.run(LIMIT_S + 2 * TICK_S, lambda _: cluster.epoch, lambda _: 0)
    assert cluster.forming == (0, 1, 2, 3) and cluster.machine.stalled_engines == [], "a probe"
    cluster.run(LIMIT_S / 2 + TICK_S, lambda _: cluster.epoch, lambda _: 0)
    assert cluster.forming == (0, 1, 2) and cluster.machine.roster.ranks == [0, 1, 2]
    [stalled] = cluster.machine.stalled_engines
    assert stalled.rank == 3
    for rank in (1, 2, 3):
        assert member(rank).address.tcp.removeprefix("tcp://") in stalled.reason
    assert "no connection with engine 1" in stalled.reason


def test_a_healthy_newcomer_is_not_removed_for_a_link_between_others() -> None:
    """The link between engines 0 and 1 is down while engine 3 joins: without engine 3, the group
    would not form either."""
    cluster = Cluster(3)
    cluster.join(range(3, 4))

    def run(seconds: float) -> None:
        for rank, peer in ((0, 1), (1, 0)):
            broken = Broken(rank, 7, cluster.epoch, "no connection", absent=[peer])
            cluster.machine.on_message(broken, cluster.now)
        cluster.run(seconds, lambda _: cluster.epoch, lambda _: 0)

    run(LIMIT_S + 2 * TICK_S)
    run(LIMIT_S / 2 - TICK_S)
    assert cluster.forming == (0, 1, 2, 3), "a probe"
    run(2 * TICK_S)
    assert not cluster.machine.called_off
    assert [each.rank for each in cluster.machine.stalled_engines] == [1]
    assert cluster.forming == (0, 2, 3)


def test_the_first_engines_are_not_removed() -> None:
    cluster = Cluster(0)
    cluster.join(range(2))
    cluster.run(LIMIT_S + 2 * TICK_S, lambda _: cluster.epoch, lambda _: 0)
    assert cluster.forming == (0, 1) and cluster.machine.joining == {0, 1}


@pytest.mark.parametrize("hangs", [True, False])
def test_a_single_engine_that_does_not_follow_the_probe_hangs(cluster, hangs: bool) -> None:
    """An engine in a group of one waits for no peer, so it hangs if it does not follow the probe.
    If it follows, it is kept: only a message of it was lost."""
    cluster.machine.remove_failed([1], cluster.now)
    assert cluster.forming == (0,)
    begun = cluster.epoch
    cluster.run(LIMIT_S + 2 * TICK_S, lambda _: begun, lambda _: 0)
    assert cluster.machine.stalled_engines == [] and cluster.epoch == begun + 1
    cluster.run(LIMIT_S / 2 + TICK_S, lambda _: begun if hangs else cluster.epoch, lambda _: 0)
    assert [stalled.rank for stalled in cluster.machine.stalled_engines] == [0] * hangs


def test_time_while_the_coordinator_was_stopped_does_not_count(cluster) -> None:
    cluster.join(range(2, 3))
    cluster.run(LIMIT_S / 2, lambda _: cluster.epoch, lambda _: 0)
    cluster.now += 10 * LIMIT_S
    cluster.run(TICK_S, lambda _: cluster.epoch, lambda _: 0)
    assert cluster.forming == (0, 1, 2)


def test_an_engine_that_steps_without_requests_may_be_the_one_that_hangs(cluster) -> None:
    """An engine that steps without requests may be the one that hangs: the others, which have the
    requests, wait for it."""
    epoch = cluster.epoch
    while cluster.now < LIMIT_S + 2 * TICK_S:
        cluster.now += TICK_S
        for rank, running, steps in ((0, 1, 6), (1, 0, 5)):
            report = EngineReport(
                rank, 7, epoch, running, progress_counter=steps, wave_phase=Phase.RUNNING
            )
            cluster.machine.on_message(report, cluster.now)
        cluster.machine.tick(cluster.now)
    assert [stalled.rank for stalled in cluster.machine.stalled_engines] == [1]


def test_an_engine_that_hangs_while_the_others_wait_for_a_pause_is_found(cluster) -> None:
    cluster.machine.pause(cluster.now)
    epoch = cluster.epoch
    while cluster.now < LIMIT_S + 2 * TICK_S:
        cluster.now += TICK_S
        for rank, steps in ((0, 6), (1, 5)):
            report = EngineReport(
                rank, 7, epoch, 1, progress_counter=steps, wave_phase=Phase.RUNNING, pausing=True
            )
            cluster.machine.on_message(report, cluster.now)
        cluster.machine.tick(cluster.now)
    assert [stalled.rank for stalled in cluster.machine.stalled_engines] == [1]


def test_the_group_does_not_wait_for_a_standalone_engine_that_does_not_follow(cluster) -> None:
    """An engine that computes on its own is not waited for if it cannot hear the coordinator, even
    though the coordinator hears it."""
    alone_in = cluster.epoch
    cluster.machine.on_message(
        EngineReport(1, 7, alone_in, wave_phase=Phase.STANDALONE), cluster.now
    )
    assert cluster.forming == (0, 1) and cluster.epoch == alone_in + 1
    for step in range(round((LIMIT_S + 2 * TICK_S) / TICK_S)):
        cluster.now += TICK_S
        for rank, epoch, phase in (
            (0, cluster.epoch, Phase.FORMING),
            (1, alone_in, Phase.STANDALONE),
        ):
            counter = step if phase is Phase.STANDALONE else 0
            report = EngineReport(rank, 7, epoch, 1, progress_counter=counter, wave_phase=phase)
            cluster.machine.on_message(report, cluster.now)
        cluster.machine.tick(cluster.now)
    assert [stalled.rank for stalled in cluster.machine.stalled_engines] == [1]
    assert cluster.forming == (0,)
