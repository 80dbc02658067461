"""Engines on a host that will be taken away serve until others do, and leave before the host
goes."""

from __future__ import annotations

import asyncio
import math

from hypothesis import given
from hypothesis import strategies as st

from swell.cluster.control.plan.fleet_view import EngineStatus, FleetView, Intent, Place
from swell.cluster.control.plan.node_drains import HANDOVER_S, Moves, plan_moves
from tests.cluster.control.fake_manager import START_S, ManagerHarness, busy, run

DRAIN_S = 30.0


def serving(rank: int, node: str, intent: Intent = Intent.STAY) -> EngineStatus:
    return EngineStatus(rank, Place.SERVING, intent, node=node)


def plan(*engines: EngineStatus, left_s: float, target: int = 2) -> Moves:
    return plan_moves(FleetView(engines), target, {"spot": left_s}, DRAIN_S)


def test_an_engine_on_a_draining_host_serves_until_its_replacement_does() -> None:
    here, moved = serving(0, "spot"), serving(0, "spot", Intent.MOVE)
    other, new = serving(1, "kept"), serving(2, "kept")
    starting = EngineStatus(2, Place.STARTING)
    assert plan(here, other, left_s=120.0) == Moves(move=(0,))
    assert plan(moved, other, starting, left_s=110.0) == Moves()
    assert plan(moved, other, new, left_s=100.0) == Moves(leave={0: DRAIN_S})


def test_an_engine_leaves_when_there_is_only_time_to_finish() -> None:
    moved, other = serving(0, "spot", Intent.MOVE), serving(1, "kept")
    assert plan(moved, other, left_s=DRAIN_S + HANDOVER_S + 1) == Moves()
    assert plan(moved, other, left_s=20.0) == Moves(leave={0: 20.0 - HANDOVER_S})
    assert plan(moved, other, left_s=0.0) == Moves(leave={0: 0.0})


def test_the_only_engine_serves_until_the_end() -> None:
    moved = serving(0, "spot", Intent.MOVE)
    assert plan(moved, left_s=20.0, target=1) == Moves()
    assert plan(moved, left_s=HANDOVER_S, target=1) == Moves(leave={0: 0.0})


def test_without_a_deadline_the_wait_for_a_replacement_is_unlimited() -> None:
    moved, other = serving(0, "spot", Intent.MOVE), serving(1, "kept")
    assert plan(moved, other, left_s=math.inf) == Moves()
    assert plan(moved, other, left_s=math.inf, target=1) == Moves(leave={0: DRAIN_S})


_ENGINES = st.lists(
    st.tuples(
        st.sampled_from(["spot", "kept"]),
        st.sampled_from(list(Intent)),
        st.sampled_from([Place.SERVING, Place.STARTING, Place.ENDING]),
    ),
    max_size=6,
)


@given(_ENGINES, st.integers(1, 4), st.floats(0.0, 200.0))
def test_every_plan_keeps_the_laws(parts: list, target: int, left_s: float) -> None:
    engines = [
        EngineStatus(rank, place, intent, node=node)
        for rank, (node, intent, place) in enumerate(parts)
    ]
    moves = plan(*engines, left_s=left_s, target=target)
    for rank in {*moves.move, *moves.leave, *moves.stay}:
        assert engines[rank].place is Place.SERVING
    assert all(engines[rank].node == "spot" for rank in moves.move)
    assert all(engines[rank].node == "kept" for rank in moves.stay)
    assert all(engines[rank].intent in (Intent.STAY, Intent.RELOAD) for rank in moves.move)
    assert all(engines[rank].intent is Intent.MOVE for rank in {*moves.leave, *moves.stay})
    surplus = [rank for rank in moves.leave if engines[rank].node == "kept"]
    staying = [e for e in engines if e.place is Place.SERVING and e.intent is Intent.STAY]
    there = [e for e in staying if e.node == "kept"]
    assert not surplus or len(there) + len(moves.stay) >= target
    for time_s in moves.leave.values():
        assert 0.0 <= time_s <= max(DRAIN_S, left_s - HANDOVER_S)
    if left_s <= HANDOVER_S:
        moving = {e.rank for e in engines if e.intent is Intent.MOVE and e.node == "spot"}
        serve = {e.rank for e in engines if e.place is Place.SERVING}
        assert {*moves.leave}.difference(surplus) == moving & serve, "all are gone before the host"


# -------------------------------------------------------------------------------- the manager


def test_the_manager_replaces_an_engine_before_its_host_is_removed() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        harness.placement.nodes = {1: "spot"}
        await harness.start()
        harness.coordinator.reports[1] = busy(1)
        harness.placement.draining = {"spot": 1000.0}
        await asyncio.sleep(START_S / 2)
        state = await harness.manager.describe()
        assert state["draining_nodes"] == [{"node": "spot", "left_s": 1000.0, "engines": [1]}]
        assert harness.active == [0, 1], "it serves on"
        assert harness.manager.target == 2
        await asyncio.sleep(START_S + 5.0)
        assert harness.active == [0, 2] and 1 in harness.placement.alive
        harness.coordinator.reports.clear()
        await harness.settle()
        assert list(harness.placement.alive) == [0, 2] and harness.manager.target == 2

    run(scenario, data=2, drain_timeout_s=600)


def test_an_engine_that_finds_no_other_host_leaves_with_its_own() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        harness.placement.nodes = {1: "spot"}
        await harness.start()
        harness.placement.capacity = 2
        harness.placement.draining = {"spot": 60.0}
        await asyncio.sleep(10.0)
        assert harness.active == [0, 1]
        harness.placement.draining = {"spot": 20.0}
        await asyncio.sleep(10.0)
        assert harness.active[0] == 0 and 1 not in harness.active
        harness.placement.draining = {}
        await asyncio.sleep(600.0)
        assert len(harness.active) == 2, "its place was free then"

    run(scenario, data=2)


def test_a_withdrawn_notice_leaves_the_target_number_of_engines() -> None:
    """Ray's GCS was restarted and no longer knows the notice."""

    async def scenario(harness: ManagerHarness) -> None:
        harness.placement.nodes = {1: "spot"}
        await harness.start()
        harness.placement.draining = {"spot": 1000.0}
        harness.placement.slow_s = {2: 600.0}
        await asyncio.sleep(START_S)
        assert harness.manager.phase == "prepare"
        harness.placement.draining = {}
        await harness.settle()
        assert harness.active == [0, 1] and list(harness.placement.alive) == [0, 1]

    run(scenario, data=2)


def test_a_replaced_engine_leaves_after_the_notice() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        harness.placement.nodes = {0: "spot"}
        await harness.start()
        harness.placement.draining = {"spot": 1000.0}
        await asyncio.sleep(START_S)
        plan_moves_of = harness.manager._elasticity._move_engines
        harness.manager._elasticity._move_engines = lambda draining: None  # type: ignore[method-assign]
        await asyncio.sleep(5.0)
        assert harness.active == [0, 1, 2]
        harness.placement.draining = {}
        harness.manager._elasticity._move_engines = plan_moves_of  # type: ignore[method-assign]
        await harness.settle()
        assert harness.active == [1, 2]

    run(scenario, data=2)
