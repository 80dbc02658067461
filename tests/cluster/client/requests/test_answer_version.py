"""An answer never mixes versions: which engines may serve a request from its first attempt until it
finishes."""

from __future__ import annotations

import pytest

from swell.cluster.client.engine_connection import EngineId
from swell.cluster.client.requests.answer_version import AnswerVersion
from swell.cluster.client.routing.routable_engines import RoutableEngines
from swell.cluster.client.routing.router import NoEngine, Router
from swell.coordinator.roster import Member, MemberState, Roster
from swell.coordinator.transport.channel import ChannelAddress
from swell.coordinator.wire import ClusterView

ADDRESS = ChannelAddress("m", "i", "t")
PROMPT = list(range(40))
ACTIVE, LEAVING, REPAIRING = MemberState.ACTIVE, MemberState.LEAVING, MemberState.REPAIRING


def member(
    rank: int, version: str, state: MemberState = ACTIVE, *, max_model_len: int = 1000
) -> Member:
    return Member(
        rank, ADDRESS, state, max_model_len=max_model_len, incarnation=rank + 1, version=version
    )


def routing(*members: Member) -> Router:
    router = Router(4)
    router.update(ClusterView(Roster(1, members)))
    return router


def test_a_finished_attempt_without_a_token_binds_no_version() -> None:
    version = AnswerVersion()
    assert version.required is None
    version.begin("1-a")
    assert version.required == "1-a" and version.required_elsewhere is None
    version.end()
    assert version.required is None
    version.begin("2-b")
    version.on_token()
    version.end()
    assert version.required == version.required_elsewhere == "2-b"


def test_choices_of_one_request_share_a_version() -> None:
    """A running choice binds the others to its version even before its first token."""
    version = AnswerVersion()
    version.begin("1-a")
    version.begin("1-a")
    assert version.required_elsewhere == "1-a"
    with pytest.raises(AssertionError, match="one version"):
        version.begin("2-b")
    version.end()
    assert version.required_elsewhere is None and version.required == "1-a"


def test_an_answer_continues_only_on_its_version() -> None:
    router = routing(member(0, "1-a"), member(1, "2-b"), member(2, "2-b"))
    for index in range(20):
        prompt = [index, *PROMPT]
        assert router.choose("r", prompt, version="1-a").rank == 0
        assert router.choose("r", prompt, version="2-b").rank in (1, 2)
    assert {router.choose(f"r{i}", [i, *PROMPT]).rank for i in range(60)} == {0, 1, 2}


def test_answers_continue_on_leaving_engines_if_all_of_their_version_leave() -> None:
    router = routing(member(0, "1-a", LEAVING), member(1, "2-b"), member(2, "1-a", REPAIRING))
    assert router.active_ranks == [1]
    assert router.choose("r", PROMPT, version="1-a").rank == 0
    assert router.choose("r", PROMPT).rank == 1
    router.set_unreachable(frozenset({EngineId(0, 1)}))
    assert not router.can_place("1-a") and router.can_place(None)
    with pytest.raises(NoEngine, match="version 1-a"):
        router.choose("r", PROMPT, version="1-a")


def test_a_leaving_engine_receives_nothing_while_its_version_has_others() -> None:
    router = routing(member(0, "1-a", LEAVING), member(1, "1-a"))
    assert {router.choose(f"r{i}", [i], version="1-a").rank for i in range(30)} == {1}


def test_a_request_is_placed_on_a_version_that_supports_its_length() -> None:
    """The request was accepted under the old version's limits. Those of the new version are
    smaller."""
    router = routing(member(0, "1-a"), member(1, "2-b", max_model_len=100))
    ranks = {router.choose(f"r{i}", [i, *PROMPT], max_tokens=80).rank for i in range(30)}
    assert ranks == {0}
    ranks = {router.choose(f"r{i}", [i, *PROMPT], max_tokens=20).rank for i in range(60)}
    assert ranks == {0, 1}


def test_engines_of_one_version_are_listed_once() -> None:
    engines = RoutableEngines(Roster(1, (member(0, ""), member(1, ""))), frozenset())
    assert engines.of_version("") is engines.active


def test_a_new_version_at_a_rank_has_no_prefix_of_the_earlier_one() -> None:
    router = routing(member(0, "1-a"), member(1, "1-a"))
    home = router.choose("r", PROMPT).rank
    assert len(router._index) > 0
    successor = Member(home, ADDRESS, incarnation=99, version="2-b")
    other = member(1 - home, "1-a")
    router.update(ClusterView(Roster(2, tuple(sorted((successor, other), key=lambda m: m.rank)))))
    assert len(router._index) == 0
