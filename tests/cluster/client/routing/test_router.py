"""The choice of an engine for a request: scores, prefix affinity, stability, and counters that
return to zero."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from swell.cluster.client.engine_connection import EngineId
from swell.cluster.client.routing import routed_engine
from swell.cluster.client.routing import router as routing
from swell.cluster.client.routing.prefix_index import PromptBlocks
from swell.cluster.client.routing.routed_engine import TOKENS_PER_ROW, Route
from swell.cluster.client.routing.router import SLACK_TOKENS, NoEngine, Router
from swell.coordinator.roster import Member, MemberState, Roster, update_members
from swell.coordinator.transport.channel import ChannelAddress
from swell.coordinator.wire import ClusterReports, ClusterView, EngineReport

BLOCK = 4
ADDRESS = ChannelAddress("machine", "ipc://@a", "tcp://127.0.0.1:1")


def view(*ranks: int, leaving: tuple[int, ...] = (), reports: tuple[EngineReport, ...] = ()):
    members = [Member(rank, ADDRESS) for rank in ranks]
    members += [Member(rank, ADDRESS, MemberState.LEAVING) for rank in leaving]
    members.sort(key=lambda member: member.rank)
    return ClusterView(Roster(1, tuple(members)), ClusterReports(engines=list(reports)))


def router_of(*ranks: int, **more: object) -> Router:
    router = Router(BLOCK)
    router.update(view(*ranks, **more))  # type: ignore[arg-type]
    return router


def prompt(conversation: int, length: int = 2 * BLOCK) -> list[int]:
    return [conversation] * length


def counters(router: Router) -> dict[int, tuple[int, int]]:
    """Returns rank -> the requests and uncomputed tokens that the router assumes in each engine."""
    return {
        rank: (engine.sent.requests, engine.sent.uncomputed_tokens)
        for rank, engine in router._engines.items()
    }


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the slack to zero, so that only equal scores tie."""
    monkeypatch.setattr(routing, "SLACK_TOKENS", 0)


# ------------------------------------------------------------------------------------ scores


@pytest.mark.parametrize(
    ("zero", "one", "chosen"),
    [
        # (waiting_tokens, running, waiting) of both engines: the smaller tokens + TOKENS_PER_ROW *
        # requests wins.
        ((100, 0, 0), (99, 0, 0), 1),
        ((99, 0, 0), (100, 0, 0), 0),
        ((0, 2, 0), (0, 1, 0), 1),
        ((0, 0, 1), (0, 0, 2), 0),
        ((0, 1, 1), (2 * TOKENS_PER_ROW + 1, 0, 0), 0),
        ((0, 1, 1), (2 * TOKENS_PER_ROW - 1, 0, 0), 1),
    ],
)
@pytest.mark.usefixtures("exact")
def test_the_smaller_backlog_wins(zero, one, chosen) -> None:
    reports = tuple(
        EngineReport(rank, waiting_tokens=load[0], running=load[1], waiting=load[2])
        for rank, load in enumerate((zero, one))
    )
    router = router_of(0, 1, reports=reports)
    assert router.choose("r", prompt(1, 1)).rank == chosen


@pytest.mark.parametrize(("extra", "stays"), [(0, True), (1, False)])
def test_a_cached_prefix_is_worth_its_tokens(extra: int, stays: bool) -> None:
    """The engine with the prefix may have more load, by up to the tokens that the prefix saves plus
    the slack."""
    router = router_of(0, 1)
    home = finish(router, 7, length=10 * BLOCK)
    worth = 10 * BLOCK + SLACK_TOKENS
    router.update(view(0, 1, reports=(EngineReport(home, waiting_tokens=worth + extra),)))
    assert (router.choose("second", [*prompt(7, 10 * BLOCK), 8, 9]).rank == home) is stays


def test_only_whole_blocks_from_the_start_count_as_cached() -> None:
    router = router_of(0)
    router.choose("a", prompt(1, 3 * BLOCK + 2))
    assert counters(router)[0] == (1, 3 * BLOCK + 2)
    router.choose("b", prompt(1, 3 * BLOCK + 2))
    assert counters(router)[0] == (2, 3 * BLOCK + 2 + 2)
    router.choose("c", [*prompt(2, BLOCK), *prompt(1, 2 * BLOCK)])
    assert counters(router)[0] == (3, 3 * BLOCK + 2 + 2 + 3 * BLOCK)
    route = router.choose("d", prompt(1, 2 * BLOCK))
    assert route.uncomputed_tokens == 1, "the last token is always computed"


def test_a_salt_separates_prefixes() -> None:
    router = router_of(0)
    routes = [router.choose("r", prompt(1), salt=salt) for salt in ("tenant", None, "tenant")]
    assert [route.uncomputed_tokens for route in routes] == [2 * BLOCK, 2 * BLOCK, 1]


def test_unused_prefix_names_expire(monkeypatch) -> None:
    monkeypatch.setattr(routed_engine, "DEFAULT_TRACKED_BLOCKS", 4)
    router = router_of(0)
    for name, conversation in [("a", 1), ("b", 2), ("a2", 1), ("c", 3)]:
        router.choose(name, prompt(conversation))
    assert len(router._engines[0].blocks) == 4
    routes = [router.choose("r", prompt(conversation)) for conversation in (1, 2)]
    assert [route.uncomputed_tokens for route in routes] == [1, 2 * BLOCK]


# -------------------------------------------------------------------------------------- placement


def finish(router: Router, conversation: int, name: str = "r", length: int = 2 * BLOCK) -> int:
    route = router.choose(name, prompt(conversation, length))
    route.release()
    return route.rank


def test_a_conversation_keeps_its_engine_as_it_grows() -> None:
    router = router_of(*range(4))
    homes = {c: finish(router, c) for c in range(50)}
    for turn in range(2, 5):
        assert {c: finish(router, c, length=2 * BLOCK * turn) for c in range(50)} == homes
    assert len(set(homes.values())) == 4


def test_ingresses_agree_on_ties() -> None:
    first, second = router_of(0, 1, 2), router_of(0, 1, 2)
    assert [finish(first, c) for c in range(30)] == [finish(second, c) for c in range(30)]


def test_few_conversations_move_when_an_engine_joins() -> None:
    """Rendezvous hashing: conversations move only to the new engine, and only about its share of
    them."""
    before = [finish(router_of(0, 1, 2), c) for c in range(300)]
    after = [finish(router_of(0, 1, 2, 3), c) for c in range(300)]
    moved = [new for old, new in zip(before, after, strict=True) if new != old]
    assert set(moved) == {3} and 40 <= len(moved) <= 115
    assert all(60 <= count <= 140 for count in Counter(before).values())


def test_only_the_conversations_of_a_removed_engine_move() -> None:
    before = [finish(router_of(0, 1, 2), c) for c in range(100)]
    after = [finish(router_of(0, 2), c) for c in range(100)]
    assert all(new == old for old, new in zip(before, after, strict=True) if old != 1)
    assert {new for old, new in zip(before, after, strict=True) if old == 1} == {0, 2}


def test_an_ingress_finds_a_conversation_that_another_one_placed() -> None:
    """The ingress knows the system prompt from its own conversations and hashes what follows it."""
    system = [9] * 8 * BLOCK
    routers = [router_of(*range(4)) for _ in range(2)]
    for router in routers:
        for rank in range(4):
            router.choose(f"warm{rank}", system, rank=rank).release()
    homes = set()
    for user in range(40):
        first = [*system, *prompt(100 + user)]
        longer = [*first, *prompt(200 + user, 50 * BLOCK)]
        routes = [routers[0].choose("turn", first), routers[1].choose("turn", longer)]
        assert routes[0].rank == routes[1].rank
        homes.add(routes[0].rank)
        for route in routes:
            route.release()
    assert homes == set(range(4))


def test_a_prompt_below_one_block_is_spread_by_its_id() -> None:
    ranks = Counter()
    for index in range(200):
        ranks[finish(router_of(0, 1, 2, 3), 1, name=f"r{index}", length=BLOCK - 1)] += 1
    assert len(ranks) == 4 and min(ranks.values()) >= 20


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 8), st.integers(1, 10), st.integers(0, 200), st.integers(0, 5000))
def test_a_burst_is_spread_over_stale_reports(
    engines: int, rounds: int, seed: int, waiting: int
) -> None:
    """The reports do not change meanwhile. Requests count as soon as they are sent, for any
    reported load, and no engine gets ahead by more than the slack and one request."""
    reports = tuple(EngineReport(rank, waiting_tokens=waiting) for rank in range(engines))
    router = router_of(*range(engines), reports=reports)
    placed = Counter()
    for index in range(engines * rounds * 5):
        placed[router.choose(f"r{index}", prompt(seed * 1000 + index)).rank] += 1
        router.update(view(*range(engines), reports=reports))
    weight = 2 * BLOCK + TOKENS_PER_ROW
    counts = [placed[rank] for rank in range(engines)]
    assert (max(counts) - min(counts)) * weight <= SLACK_TOKENS + weight


@pytest.mark.usefixtures("exact")
def test_a_sent_prompt_counts_until_it_is_answered() -> None:
    router = router_of(0, 1)
    long = router.choose("long", prompt(1, 200), rank=0)
    for index in range(2):
        router.choose(f"short{index}", prompt(2 + index, 1), rank=1)
    during = router.choose("during", prompt(9, 1))
    assert during.rank == 1
    during.release()
    long.on_first_token()
    assert router.choose("after", prompt(9, 1)).rank == 0


def test_the_report_shows_requests_of_other_ingresses() -> None:
    router = router_of(0, 1, reports=(EngineReport(0, running=8, waiting_tokens=500),))
    assert [router.choose(f"r{i}", prompt(i)).rank for i in range(5)] == [1] * 5


def test_an_answer_ends_the_wait_of_its_prompt_only() -> None:
    router = router_of(0)
    route = router.choose("a", prompt(1))
    route.on_first_token()
    assert counters(router)[0] == (1, 0)
    route.on_first_token()
    route.release()
    assert counters(router)[0] == (0, 0)


def test_a_new_engine_receives_its_share_of_later_requests() -> None:
    """Three ingresses see an idle new engine in the same late report."""
    old = tuple(EngineReport(rank, running=4, waiting_tokens=300) for rank in range(3))
    routers = [router_of(*range(4), reports=(*old, EngineReport(3))) for _ in range(3)]
    placed = Counter(
        routers[index % 3].choose(f"r{index}", prompt(index, 100)).rank for index in range(120)
    )
    # Each may fill the gap once: 428 tokens and the slack are at most 6 requests of 132.
    assert 30 <= placed[3] <= 30 + 3 * 6 and min(placed.values()) >= 15


@pytest.mark.parametrize("reports", [1, 2])
def test_a_prompt_counts_in_addition_until_the_second_report(reports: int) -> None:
    """The first report after the request may have been written before the request arrived."""
    router = router_of(0, reports=(EngineReport(0, waiting_tokens=1000),))
    router.choose("r", prompt(1, 50))
    for steps in range(1, reports + 1):
        router.update(view(0, reports=(EngineReport(0, waiting_tokens=1000, steps=steps),)))
    assert router._engines[0].cost(0, BLOCK) == (1000 + (50 if reports < 2 else 0) + TOKENS_PER_ROW)


# -------------------------------------------------------------------------------- caches


def member(rank: int, *state: MemberState, **changes: object) -> Member:
    return Member(rank, ADDRESS, *state, **changes)  # type: ignore[arg-type]


def test_engines_of_a_numerics_class_are_preferred() -> None:
    """Even if another one is idle, or has the whole prefix; not if they are leaving."""
    router, classes = Router(BLOCK), ("a", "a", "b", "b")
    members = [member(rank, numerics=name, num_blocks=99) for rank, name in enumerate(classes)]
    members[3] = member(3, MemberState.LEAVING, numerics="b")
    reports = [EngineReport(2, running=50, waiting_tokens=9000)]
    router.update(ClusterView(Roster(1, tuple(members)), ClusterReports(engines=reports)))
    assert router.choose("r", prompt(1), numerics="b").rank == 2
    assert router.choose("r", prompt(1), numerics="a").rank in (0, 1)
    assert router.choose("r", prompt(2)).rank in (0, 1)
    assert router.choose("r", prompt(2), numerics="c").rank in (0, 1)
    router.set_unreachable(frozenset({EngineId.of(members[2])}))
    assert router.choose("r", prompt(1), numerics="b").rank in (0, 1)


def test_the_router_remembers_no_more_blocks_than_the_cache_holds() -> None:
    router = Router(BLOCK)
    router.update(ClusterView(Roster(1, (member(0, num_blocks=5),))))
    for conversation in range(6):
        finish(router, conversation)
        assert len(router._engines[0].blocks) <= 5
    # Blocks at the end of a chain are evicted before those at its start.
    assert router._engines[0].cached_blocks(names_of(prompt(5))) == 2
    assert router._engines[0].cached_blocks(names_of(prompt(3))) == 1


def test_blocks_of_other_ingresses_displace_remembered_ones() -> None:
    router = Router(BLOCK)
    roster = Roster(1, (member(0, num_blocks=10),))
    router.update(ClusterView(roster))
    for conversation in range(4):
        finish(router, conversation)
    assert len(router._engines[0].blocks) == 8
    router.update(ClusterView(roster, ClusterReports(engines=[EngineReport(0, kv_usage=0.7)])))
    assert len(router._engines[0].blocks) == 3


def test_a_full_cache_costs_the_evicted_blocks() -> None:
    router = Router(BLOCK)
    roster = Roster(1, (member(0, num_blocks=100), member(1, num_blocks=100)))
    half = EngineReport(1, running=20, kv_usage=0.5)
    router.update(
        ClusterView(
            roster, ClusterReports(engines=[EngineReport(0, running=10, kv_usage=1.0), half])
        )
    )
    tokens = 50 * BLOCK
    engines = router._engines
    assert engines[0].cost(tokens, BLOCK) == 2 * tokens + 10 * TOKENS_PER_ROW
    assert engines[1].cost(tokens, BLOCK) == tokens + 20 * TOKENS_PER_ROW
    assert engines[1].cost(tokens + 3, BLOCK) == tokens + 3 + 20 * TOKENS_PER_ROW + 3


def test_the_successor_of_an_unreachable_engine_receives_requests() -> None:
    router = Router(BLOCK)
    router.update(ClusterView(Roster(1, (member(0, incarnation=1), member(1, incarnation=2)))))
    router.set_unreachable(frozenset({EngineId(0, 1), EngineId(1, 2)}))
    assert router.active_ranks == []
    router.update(ClusterView(Roster(2, (member(0, incarnation=3), member(1, incarnation=2)))))
    assert router.active_ranks == [0]


def names_of(token_ids: list[int]) -> list[int]:
    return PromptBlocks(token_ids, BLOCK, None).names


def test_a_restarted_engine_has_an_empty_cache() -> None:
    router = Router(BLOCK)
    router.update(ClusterView(Roster(1, (member(0, incarnation=1),))))
    old = router.choose("old", prompt(1))
    reborn = Roster(2, (member(0, incarnation=2),))
    router.update(
        ClusterView(
            reborn, ClusterReports(engines=[EngineReport(0, incarnation=1, waiting_tokens=900)])
        )
    )
    engine = router._engines[0]
    assert engine.cached_blocks(names_of(prompt(1))) == 0
    assert engine.cost(0, BLOCK) == 0, "neither the dead one's requests nor its last report"
    old.release()
    assert counters(router)[0] == (0, 0)


def test_a_repairing_engine_receives_nothing_and_its_cache_is_forgotten() -> None:
    router = router_of(0, 1)
    home = finish(router, 5, length=100 * BLOCK)
    roster = Roster(2, tuple(member(r) for r in (0, 1)))
    router.update(ClusterView(update_members(roster, [home], state=MemberState.REPAIRING)))
    assert router.active_ranks == [1 - home]
    assert finish(router, 6) == 1 - home
    router.update(ClusterView(update_members(roster, [0, 1], state=MemberState.REPAIRING)))
    with pytest.raises(NoEngine, match="no engine"):
        router.choose("r", prompt(5))
    router.update(ClusterView(roster))
    assert router._engines[home].cached_blocks(names_of(prompt(5))) == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12)), max_size=30), st.integers(1, 20))
def test_the_start_of_a_block_chain_is_remembered(
    prompts: list[tuple[int, int]], num_blocks: int
) -> None:
    """A chain is always remembered as a prefix. The search for the end of a cached prefix relies on
    this to skip blocks."""
    router = Router(BLOCK)
    router.update(ClusterView(Roster(1, (member(0, num_blocks=num_blocks),))))
    for index, (conversation, blocks) in enumerate(prompts):
        names = names_of([conversation % 2] * 3 * BLOCK + [conversation] * blocks * BLOCK)
        router.choose(f"r{index}", [conversation % 2] * 3 * BLOCK + [conversation] * blocks * BLOCK)
        known = [name in router._engines[0].blocks for name in names]
        assert known == sorted(known, reverse=True)
        assert router._engines[0].cached_blocks(names) == sum(known)


# ---------------------------------------------------------------------------------- membership


def test_without_an_active_engine_no_request_is_placed() -> None:
    for router in (Router(BLOCK), router_of(), router_of(leaving=(0, 1))):
        with pytest.raises(NoEngine, match="no engine"):
            router.choose("r", prompt(1))
        assert router.active_ranks == []


def test_a_rank_can_be_requested() -> None:
    router = router_of(0, 1, 2, leaving=(3,))
    routes = [router.choose("r", prompt(1), rank=rank) for rank in (2, 0, 1)]
    assert [route.rank for route in routes] == [2, 0, 1]
    for rank in (3, 9):
        with pytest.raises(NoEngine, match=rf"engine {rank} .*\[0, 1, 2\]"):
            router.choose("r", prompt(1), rank=rank)
    assert counters(router)[3] == (0, 0)


def test_leaving_engines_receive_nothing_although_they_hold_the_prefix() -> None:
    router = router_of(0, 1)
    home = finish(router, 5, length=10 * BLOCK)
    router.update(view(1 - home, leaving=(home,)))
    for index in range(20):
        assert router.choose(f"r{index}", prompt(5, 10 * BLOCK)).rank == 1 - home


def test_reports_of_engines_outside_the_roster_are_ignored() -> None:
    router = router_of(0, reports=(EngineReport(0), EngineReport(4)))
    assert router.active_ranks == [0] and router.choose("r", prompt(1)).rank == 0


class Conservation(RuleBasedStateMachine):
    """Requests arrive, are answered and finish in any order, while engines join, leave and fail.

    The router's counters of an engine cover only requests placed on *that* engine: an engine that
    takes over the rank of a lost one starts and ends at zero.
    """

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(BLOCK)
        self.states: dict[int, MemberState] = {}
        self.lives: dict[int, int] = {}
        self.routes: dict[str, tuple[Route, int]] = {}
        """Request id -> its route, and the incarnation of its engine."""
        self.unanswered: set[str] = set()
        self.count = 0
        self.reports: dict[int, EngineReport] = {}

    def _report(self) -> None:
        members = [
            Member(rank, ADDRESS, state, incarnation=self.lives[rank], num_blocks=6)
            for rank, state in sorted(self.states.items())
        ]
        self.router.update(
            ClusterView(
                Roster(1, tuple(members)), ClusterReports(engines=list(self.reports.values()))
            )
        )

    @rule(rank=st.integers(0, 3))
    def an_engine_comes(self, rank: int) -> None:
        if rank not in self.states:
            self.states[rank] = MemberState.ACTIVE
            self.lives[rank] = self.lives.get(rank, 0) + 1
            self._report()

    @rule(rank=st.integers(0, 3))
    def an_engine_leaves(self, rank: int) -> None:
        if rank in self.states:
            self.states[rank] = MemberState.LEAVING
            self._report()

    @rule(rank=st.integers(0, 3))
    def an_engine_goes(self, rank: int) -> None:
        self.states.pop(rank, None)
        self._report()

    @rule(rank=st.integers(0, 3))
    def an_engine_starts_again(self, rank: int) -> None:
        """Only the incarnation shows the restart: the roster without the engine was never
        published."""
        if rank in self.states:
            self.lives[rank] += 1
            self._report()

    @rule(rank=st.integers(0, 3))
    def an_engine_is_repaired(self, rank: int) -> None:
        if rank in self.states:
            repairing = self.states[rank] is MemberState.REPAIRING
            self.states[rank] = MemberState.ACTIVE if repairing else MemberState.REPAIRING
            self._report()

    @rule(rank=st.integers(0, 3), usage=st.floats(0, 1), steps=st.integers(0, 3))
    def an_engine_reports(self, rank: int, usage: float, steps: int) -> None:
        life = self.lives.get(rank, 0)
        self.reports[rank] = EngineReport(rank, life, kv_usage=usage, steps=steps)
        self._report()

    @rule(conversation=st.integers(0, 3), length=st.integers(1, 12))
    def a_request_comes(self, conversation: int, length: int) -> None:
        active = [r for r, s in self.states.items() if s is MemberState.ACTIVE]
        self.count += 1
        name = f"r{self.count}"
        if not active:
            with pytest.raises(NoEngine):
                self.router.choose(name, prompt(conversation, length))
            return
        route = self.router.choose(name, prompt(conversation, length))
        assert route.rank in active
        self.routes[name] = (route, self.lives[route.rank])
        self.unanswered.add(name)

    @rule(data=st.data(), ends=st.booleans())
    def a_request_continues(self, data: st.DataObject, ends: bool) -> None:
        if self.routes:
            name = data.draw(st.sampled_from(sorted(self.routes)))
            self.unanswered.discard(name)
            if ends:
                self.routes.pop(name)[0].release()
            else:
                self.routes[name][0].on_first_token()

    @invariant()
    def the_backlog_sums_all_engines(self) -> None:
        """The router recomputes only engines that have changed, yet the sums cover all engines."""
        engines = self.router._engines.values()
        for rows in (2, 5):
            parts = ([e.waiting(rows) for e in engines], [e.own_waiting(rows) for e in engines])
            sums = [
                [sum(column) for column in zip(*part, strict=True)] or [0] * 4 for part in parts
            ]
            assert [list(self.router.backlog(rows)), list(self.router.own_backlog(rows))] == sums

    @invariant()
    def the_index_has_what_the_engines_hold(self) -> None:
        held: dict[bytes, set[int]] = {}
        for rank, engine in self.router._engines.items():
            for block_hash in engine.blocks:
                held.setdefault(block_hash, set()).add(rank)
        index = self.router._index
        assert {block_hash: set(index.holders(block_hash)) for block_hash in held} == held
        assert len(index) == len(held)

    @invariant()
    def an_engine_counts_what_it_has(self) -> None:
        for rank, (requests, uncomputed) in counters(self.router).items():
            here = [
                name
                for name, (route, life) in self.routes.items()
                if (route.rank, life) == (rank, self.lives[rank])
            ]
            assert requests == len(here)
            assert (uncomputed > 0) == any(name in self.unanswered for name in here)
            for load in self.router._engines[rank].unreported.values():
                assert min(load.uncomputed_tokens, load.requests, load.blocks) >= 0

    def teardown(self) -> None:
        for route, _ in self.routes.values():
            route.release()
        assert set(counters(self.router).values()) <= {(0, 0)}


Conservation.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestConservation = Conservation.TestCase


class ConservationOfMany(Conservation):
    """Considers only two neighbours on the hash ring, and two engines that hold the prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(routing, "MAX_SCORED", 2)
        self.patch.setattr(routing, "CONSIDERED", 2)

    def teardown(self) -> None:
        self.patch.undo()
        super().teardown()


ConservationOfMany.TestCase.settings = Conservation.TestCase.settings
TestConservationOfMany = ConservationOfMany.TestCase


# -------------------------------------------------------------------------------- many engines


def test_many_engines_share_conversations_evenly_and_keep_them() -> None:
    """Each of a hundred engines gets its share, and a conversation stays on its engine."""
    router = router_of(*range(100))
    homes = {c: finish(router, c) for c in range(2000)}
    counts = Counter(homes.values())
    assert len(counts) == 100 and max(counts.values()) <= 60
    assert {c: finish(router, c, length=6 * BLOCK) for c in range(2000)} == homes


def test_ingresses_agree_about_many_engines() -> None:
    first, second = router_of(*range(100)), router_of(*range(100))
    assert [finish(first, c) for c in range(50)] == [finish(second, c) for c in range(50)]


def test_few_conversations_move_when_one_of_many_engines_joins() -> None:
    before = [finish(router_of(*range(100)), c) for c in range(300)]
    after = [finish(router_of(*range(101)), c) for c in range(300)]
    moved = [new for old, new in zip(before, after, strict=True) if new != old]
    assert 100 in moved and len(moved) <= 20


def test_a_prefix_that_all_engines_hold_does_not_attract_requests() -> None:
    """New conversations that share a system prompt are also spread by load."""
    router = router_of(*range(100), reports=tuple(EngineReport(r) for r in range(100)))
    system = list(range(1000, 1000 + 8 * BLOCK))
    for rank in range(100):
        router.choose(f"w{rank}", system, rank=rank).release()
    chosen = Counter(
        router.choose(f"r{c}", [*system, *prompt(c, 2 * BLOCK)]).rank for c in range(400)
    )
    assert len(chosen) >= 90 and max(chosen.values()) <= 12


def test_all_engines_together_remember_a_bounded_number_of_blocks(monkeypatch) -> None:
    monkeypatch.setattr(routing, "MAX_TRACKED_BLOCKS", 20)
    router = router_of(*range(4))
    for conversation in range(100):
        finish(router, conversation)
    assert all(len(engine.blocks) <= 5 for engine in router._engines.values())
    assert len(router._index) <= 20
