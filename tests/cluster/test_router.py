"""Which engine gets a request: arithmetic, affinity, stability, and counters that come to zero."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from swell.cluster.routing import router as routing
from swell.cluster.routing.router import TOKENS_PER_ROW, NoEngine, Router
from swell.coordinator.channel import ChannelAddress
from swell.coordinator.roster import Member, MemberState, Roster
from swell.coordinator.wire import ClusterView, EngineReport

BLOCK = 4
ADDRESS = ChannelAddress("machine", "ipc://@a", "tcp://127.0.0.1:1")


def view(*ranks: int, leaving: tuple[int, ...] = (), reports: tuple[EngineReport, ...] = ()):
    members = [Member(rank, ADDRESS) for rank in ranks]
    members += [Member(rank, ADDRESS, MemberState.LEAVING) for rank in leaving]
    members.sort(key=lambda member: member.rank)
    return ClusterView(Roster(1, tuple(members)), list(reports))


def router_of(*ranks: int, **more: object) -> Router:
    router = Router(BLOCK)
    router.update(view(*ranks, **more))  # type: ignore[arg-type]
    return router


def prompt(conversation: int, length: int = 2 * BLOCK) -> list[int]:
    return [conversation] * length


def counters(router: Router) -> dict[int, tuple[int, int]]:
    """Requests and uncomputed tokens that the router believes to be in each engine."""
    return {
        rank: (engine.requests, sum(engine.uncomputed.values()))
        for rank, engine in router._engines.items()
    }


# -------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize(
    ("zero", "one", "chosen"),
    [
        # (waiting_tokens, running, waiting): the smaller of tokens + TOKENS_PER_ROW * requests
        ((100, 0, 0), (99, 0, 0), 1),
        ((99, 0, 0), (100, 0, 0), 0),
        ((0, 2, 0), (0, 1, 0), 1),
        ((0, 0, 1), (0, 0, 2), 0),
        ((0, 1, 1), (2 * TOKENS_PER_ROW + 1, 0, 0), 0),
        ((0, 1, 1), (2 * TOKENS_PER_ROW - 1, 0, 0), 1),
    ],
)
def test_the_smaller_backlog_wins(zero, one, chosen) -> None:
    reports = tuple(
        EngineReport(rank, waiting_tokens=load[0], running=load[1], waiting=load[2])
        for rank, load in enumerate((zero, one))
    )
    router = router_of(0, 1, reports=reports)
    assert router.choose("r", prompt(1, 1)) == chosen


@pytest.mark.parametrize(("extra", "stays"), [(-1, True), (1, False)])
def test_a_cached_prefix_is_worth_its_tokens(extra: int, stays: bool) -> None:
    """An engine with the prefix may be busier by just what the prefix saves."""
    router = router_of(0, 1)
    home = router.choose("first", prompt(7, 10 * BLOCK))
    router.done("first")
    router.update(view(0, 1, reports=(EngineReport(home, waiting_tokens=10 * BLOCK + extra),)))
    assert (router.choose("second", [*prompt(7, 10 * BLOCK), 8, 9]) == home) is stays


def test_only_whole_blocks_from_the_start_count_as_cached() -> None:
    router = router_of(0)
    router.choose("a", prompt(1, 3 * BLOCK + 2))
    assert counters(router)[0] == (1, 3 * BLOCK + 2)
    router.choose("b", prompt(1, 3 * BLOCK + 2))
    assert counters(router)[0] == (2, 3 * BLOCK + 2 + 2)
    router.choose("c", [*prompt(2, BLOCK), *prompt(1, 2 * BLOCK)])
    assert counters(router)[0] == (3, 3 * BLOCK + 2 + 2 + 3 * BLOCK)
    router.choose("d", prompt(1, 2 * BLOCK))
    assert router._engines[0].uncomputed["d"] == 1, "the last token is always computed"


def test_a_salt_separates_prefixes() -> None:
    router = router_of(0)
    router.choose("a", prompt(1), salt="tenant")
    router.choose("b", prompt(1))
    router.choose("c", prompt(1), salt="tenant")
    assert [router._engines[0].uncomputed[name] for name in "abc"] == [2 * BLOCK, 2 * BLOCK, 1]


def test_names_that_were_not_used_for_long_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(routing, "REMEMBERED_BLOCKS", 4)
    router = router_of(0)
    for name, conversation in [("a", 1), ("b", 2), ("a2", 1), ("c", 3)]:
        router.choose(name, prompt(conversation))
    assert len(router._engines[0].blocks) == 4
    router.choose("a3", prompt(1))
    router.choose("b2", prompt(2))
    uncomputed = router._engines[0].uncomputed
    assert (uncomputed["a3"], uncomputed["b2"]) == (1, 2 * BLOCK)


# -------------------------------------------------------------------------------- where things go


def finish(router: Router, conversation: int, name: str = "r", length: int = 2 * BLOCK) -> int:
    rank = router.choose(name, prompt(conversation, length))
    router.done(name)
    return rank


def test_a_conversation_keeps_its_engine_as_it_grows() -> None:
    router = router_of(*range(4))
    homes = {c: finish(router, c) for c in range(50)}
    for turn in range(2, 5):
        assert {c: finish(router, c, length=2 * BLOCK * turn) for c in range(50)} == homes
    assert len(set(homes.values())) == 4


def test_ingresses_agree_on_ties() -> None:
    first, second = router_of(0, 1, 2), router_of(0, 1, 2)
    assert [finish(first, c) for c in range(30)] == [finish(second, c) for c in range(30)]


def test_few_conversations_move_when_an_engine_comes() -> None:
    """Rendezvous: those that move go to the newcomer, and it is about its share."""
    before = [finish(router_of(0, 1, 2), c) for c in range(300)]
    after = [finish(router_of(0, 1, 2, 3), c) for c in range(300)]
    moved = [new for old, new in zip(before, after, strict=True) if new != old]
    assert set(moved) == {3} and 40 <= len(moved) <= 115
    assert all(60 <= count <= 140 for count in Counter(before).values())


def test_only_the_conversations_of_an_engine_that_goes_move() -> None:
    before = [finish(router_of(0, 1, 2), c) for c in range(100)]
    after = [finish(router_of(0, 2), c) for c in range(100)]
    assert all(new == old for old, new in zip(before, after, strict=True) if old != 1)
    assert {new for old, new in zip(before, after, strict=True) if old == 1} == {0, 2}


def test_a_prompt_below_one_block_is_spread_by_its_id() -> None:
    ranks = Counter()
    for index in range(200):
        ranks[finish(router_of(0, 1, 2, 3), 1, name=f"r{index}", length=BLOCK - 1)] += 1
    assert len(ranks) == 4 and min(ranks.values()) >= 20


@given(st.integers(1, 8), st.integers(1, 10), st.integers(0, 200))
def test_a_burst_is_spread_evenly_over_stale_reports(engines: int, rounds: int, seed: int) -> None:
    """Nothing is heard of the engines meanwhile: what was sent is counted."""
    reports = tuple(EngineReport(rank) for rank in range(engines))
    router = router_of(*range(engines), reports=reports)
    placed = Counter()
    for index in range(engines * rounds):
        placed[router.choose(f"r{index}", prompt(seed * 1000 + index))] += 1
        router.update(view(*range(engines), reports=reports))
    assert set(placed.values()) == {rounds}


def test_a_prompt_that_was_sent_weighs_until_it_is_answered() -> None:
    router = router_of(0, 1)
    router.choose("long", prompt(1, 200), rank=0)
    for index in range(2):
        router.choose(f"short{index}", prompt(2 + index, 1), rank=1)
    assert router.choose("during", prompt(9, 1)) == 1
    router.done("during")
    router.answered("long")
    assert router.choose("after", prompt(9, 1)) == 0


def test_what_others_sent_is_seen_in_the_report() -> None:
    router = router_of(0, 1, reports=(EngineReport(0, running=8, waiting_tokens=500),))
    assert [router.choose(f"r{i}", prompt(i)) for i in range(5)] == [1] * 5


def test_an_answer_ends_the_wait_of_its_prompt_only() -> None:
    router = router_of(0)
    router.choose("a", prompt(1))
    router.answered("a")
    assert counters(router)[0] == (1, 0)
    router.answered("a")
    router.done("a")
    assert counters(router)[0] == (0, 0)


# -------------------------------------------------------------------------------- who is there


def test_without_an_active_engine_there_is_no_place() -> None:
    for router in (Router(BLOCK), router_of(), router_of(leaving=(0, 1))):
        with pytest.raises(NoEngine, match="no engine"):
            router.choose("r", prompt(1))
        assert router.rank_of("r") is None and router.active_ranks == []


def test_a_rank_can_be_asked_for() -> None:
    router = router_of(0, 1, 2, leaving=(3,))
    assert [router.choose(f"r{rank}", prompt(1), rank=rank) for rank in (2, 0, 1)] == [2, 0, 1]
    for rank in (3, 9):
        with pytest.raises(NoEngine, match=rf"engine {rank} .*\[0, 1, 2\]"):
            router.choose("r", prompt(1), rank=rank)
    assert router.rank_of("r") is None


def test_leaving_engines_get_nothing_though_they_hold_the_prefix() -> None:
    router = router_of(0, 1)
    home = finish(router, 5, length=10 * BLOCK)
    router.update(view(1 - home, leaving=(home,)))
    for index in range(20):
        assert router.choose(f"r{index}", prompt(5, 10 * BLOCK)) == 1 - home


def test_reports_of_engines_outside_of_the_roster_are_ignored() -> None:
    router = router_of(0, reports=(EngineReport(0), EngineReport(4)))
    assert router.active_ranks == [0] and router.choose("r", prompt(1)) == 0


def test_where_requests_are() -> None:
    router = router_of(0, 1)
    router.choose("a", prompt(1), rank=1)
    router.choose("b", prompt(1), rank=0)
    assert (router.rank_of("a"), router.rank_of("b"), router.rank_of("c")) == (1, 0, None)
    assert router.placed_on(1) == ["a"]
    router.done("a")
    router.done("a")
    assert router.rank_of("a") is None and router.placed_on(1) == []


class Conservation(RuleBasedStateMachine):
    """Requests come, are answered and end in any order, while engines come, leave and die.

    What the router counts for an engine is what was placed on *that* engine: one that takes
    the rank of a dead one starts from nothing, and ends at nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(BLOCK)
        self.states: dict[int, MemberState] = {}
        self.lives: dict[int, int] = {}
        self.placed: dict[str, tuple[int, int]] = {}
        """Where each request is: rank, and which life of that rank."""
        self.unanswered: set[str] = set()
        self.count = 0

    def _tell(self) -> None:
        active = [r for r, s in self.states.items() if s is MemberState.ACTIVE]
        leaving = [r for r, s in self.states.items() if s is MemberState.LEAVING]
        self.router.update(view(*active, leaving=tuple(leaving)))

    @rule(rank=st.integers(0, 3))
    def an_engine_comes(self, rank: int) -> None:
        if rank not in self.states:
            self.states[rank] = MemberState.ACTIVE
            self.lives[rank] = self.lives.get(rank, 0) + 1
            self._tell()

    @rule(rank=st.integers(0, 3))
    def an_engine_leaves(self, rank: int) -> None:
        if rank in self.states:
            self.states[rank] = MemberState.LEAVING
            self._tell()

    @rule(rank=st.integers(0, 3))
    def an_engine_goes(self, rank: int) -> None:
        self.states.pop(rank, None)
        self._tell()

    @rule(conversation=st.integers(0, 3), length=st.integers(1, 12))
    def a_request_comes(self, conversation: int, length: int) -> None:
        active = [r for r, s in self.states.items() if s is MemberState.ACTIVE]
        self.count += 1
        name = f"r{self.count}"
        if not active:
            with pytest.raises(NoEngine):
                self.router.choose(name, prompt(conversation, length))
            return
        rank = self.router.choose(name, prompt(conversation, length))
        assert rank in active
        self.placed[name] = (rank, self.lives[rank])
        self.unanswered.add(name)

    @rule(data=st.data(), ends=st.booleans())
    def a_request_goes_on(self, data: st.DataObject, ends: bool) -> None:
        if self.placed:
            name = data.draw(st.sampled_from(sorted(self.placed)))
            self.unanswered.discard(name)
            if ends:
                self.router.done(name)
                del self.placed[name]
            else:
                self.router.answered(name)

    @invariant()
    def an_engine_counts_what_it_has(self) -> None:
        for rank, (requests, uncomputed) in counters(self.router).items():
            here = [n for n, where in self.placed.items() if where == (rank, self.lives[rank])]
            assert requests == len(here)
            assert (uncomputed > 0) == any(name in self.unanswered for name in here)

    def teardown(self) -> None:
        for name in list(self.placed):
            self.router.done(name)
        assert set(counters(self.router).values()) <= {(0, 0)}


Conservation.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestConservation = Conservation.TestCase
