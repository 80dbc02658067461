"""A roster changes only through pure functions, and its epoch counts its changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swell.coordinator import roster as functions
from swell.coordinator.roster import (
    MAX_LEFT,
    Member,
    MemberState,
    Roster,
    detach,
    join,
    leave,
    remove,
)
from swell.coordinator.transport.channel import ChannelAddress

ADDRESS = ChannelAddress("machine", "ipc://@a", "tcp://127.0.0.1:1")


def member(rank: int, **fields: object) -> Member:
    return Member(rank, ADDRESS, **fields)  # type: ignore[arg-type]


def roster_of(*ranks: int) -> Roster:
    return join(Roster(), map(member, ranks))


ranks = st.lists(st.integers(0, 6), max_size=4)
names = st.sampled_from(["join", "leave", "remove", "detach"])
steps = st.lists(st.tuples(names, ranks), max_size=12)


@given(steps)
def test_a_change_advances_the_epoch_and_a_no_op_keeps_the_roster(changes) -> None:
    """The members are those of a reference dict of states, in the order of their ranks."""
    roster, states = Roster(), {}
    for name, going in changes:
        wanted = dict(states)
        if name == "join":
            going = [r for r in dict.fromkeys(going) if r not in states]
            wanted |= dict.fromkeys(going, MemberState.ACTIVE)
        elif name == "leave":
            wanted |= {r: MemberState.LEAVING for r in going if r in states}
        else:
            wanted = {r: s for r, s in states.items() if r not in going}
        arguments = map(member, going) if name == "join" else going
        following = getattr(functions, name)(roster, arguments)
        if wanted == states:
            assert following is roster
        else:
            assert following.epoch == roster.epoch + 1
        roster, states = following, wanted
        assert roster.ranks == sorted(states)
        assert {m.rank: m.state for m in roster.members} == states


def test_an_occupied_rank_cannot_join() -> None:
    roster = roster_of(0, 1)
    with pytest.raises(ValueError, match=r"rank 1 .* epoch 1"):
        join(roster, [member(2), member(1)])
    with pytest.raises(ValueError, match="rank 3"):
        join(roster, [member(3), member(3)])
    with pytest.raises(ValueError, match="rank 0"):
        join(leave(roster, [0]), [member(0)])
    assert roster.ranks == [0, 1]


def test_a_removed_rank_can_be_reused() -> None:
    roster = join(remove(roster_of(0, 1), [0]), [member(0, max_model_len=7)])
    assert roster.epoch == 3 and roster.ranks == [0, 1]
    assert roster.members[0].max_model_len == 7
    assert roster.members[0].state is MemberState.ACTIVE


def test_newcomers_that_join_together_make_one_epoch() -> None:
    assert roster_of(4, 2, 0).epoch == 1
    assert roster_of(4, 2, 0).ranks == [0, 2, 4]


def test_requested_departures_are_distinguished_from_losses() -> None:
    roster = join(Roster(), [member(rank, incarnation=10 + rank) for rank in range(4)])
    roster = remove(detach(leave(roster, [0, 1, 2]), [1, 0, 7]), [2])
    assert roster.ranks == [3] and roster.left == (10, 11)
    roster = join(roster, [member(1, incarnation=11), member(0, incarnation=20)])
    assert roster.left == (10,), "engine 1 is back"
    assert remove(roster, [1]).left == (10,)


def test_the_roster_remembers_the_latest_departures() -> None:
    roster = Roster()
    for incarnation in range(MAX_LEFT + 5):
        roster = detach(join(roster, [member(0, incarnation=incarnation)]), [0])
    assert roster.left == tuple(range(5, MAX_LEFT + 5))
