"""What a manager finds in Ray when it comes, and what it does with it. Ray is a table here, whose
rows go a while after they were ended."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from swell.cluster.control import placement
from swell.cluster.control.actor_errors import (
    ActorDied,
    ActorRaised,
    ActorUnavailable,
    GcsUnavailable,
)
from swell.cluster.control.actor_names import EngineName, engine_tag
from swell.cluster.control.engine_handle import StartFailed
from swell.cluster.control.placement import Placement
from swell.configs.schema import ConfigError, load
from swell.coordinator.channel import ChannelAddress
from swell.coordinator.ground import ThreadGround
from swell.coordinator.roster import Member, Roster
from swell.coordinator.wire import ClusterView
from swell.engine.executor import ExecutorLimits
from swell.engine.ready import EngineReady
from tests.cluster.control.fake_ray import KEYS, FakeRay

TAG = engine_tag("configuration", KEYS.public.hex())
ADDRESS = ChannelAddress("m", "i", "t")
LOADING = ActorRaised(RuntimeError("it still loads"))
DEAD = ActorDied("its process ended")


def name(rank: int, start: str, tag: str = TAG) -> str:
    return str(EngineName("swell-app", rank, tag, start))


class Table(FakeRay):
    """Engines and what they say of themselves. Both they and their groups take a while to go."""

    def engine(
        self, rank: int, start: str, says: Any, *, tag: str = TAG, group: bool = True
    ) -> str:
        text = name(rank, start, tag)
        self.actors[text] = says
        if group:
            self.reserved.append(text)
        return text


class FakeCoordinator:
    """What `Placement` asks of a `CoordinatorHandle`."""

    name = "coordinator-configuration"
    contact = SimpleNamespace(keys=KEYS, address=ADDRESS)

    def __init__(self, *members: Member) -> None:
        self.roster = Roster(1, members)
        self.lost: list[int] = []

    async def view(self) -> ClusterView:
        return ClusterView(self.roster)

    async def remove_failed(self, ranks: list[int]) -> None:
        self.lost += ranks


def says(rank: int, incarnation: int) -> EngineReady:
    limits = ExecutorLimits(10, 100, 50)
    return EngineReady(rank, ADDRESS, limits, 7, "node", [], incarnation)


def member(rank: int, incarnation: int) -> Member:
    return Member(rank, ADDRESS, incarnation=incarnation)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    monkeypatch.setattr(placement, "_POLL_S", 0.0)
    return Table()


def made(coordinator: FakeCoordinator, ray: FakeRay) -> Placement:
    config = load({"model": {"path": "m"}})
    return Placement(
        config,
        "configuration",
        "swell-app",
        coordinator,  # type: ignore[arg-type]
        ray,
        ThreadGround(),
    )


def test_what_serves_loads_or_waits_is_adopted_and_all_else_is_ended(table: Table) -> None:
    serving = table.engine(0, "a", says(0, 5))
    table.engine(0, "b", LOADING)
    waiting = table.engine(1, "c", says(1, 6))
    loading = table.engine(2, "d", LOADING)
    table.engine(3, "e", DEAD)
    table.engine(4, "f", says(4, 8), tag=engine_tag("another", KEYS.public.hex()))
    table.engine(5, "g", says(5, 9), group=False)
    table.reserved += [name(6, "h"), "swell-app-engine-7", "of somebody else"]
    table.actors["coordinator-configuration"] = table.actors["coordinator-another"] = DEAD
    coordinator = FakeCoordinator(member(0, 5), member(1, 3), member(3, 7))
    adopted, newcomers = asyncio.run(made(coordinator, table).adopt())
    assert [handle.name for handle in adopted] == [serving]
    assert [handle.name for handle in newcomers] == [waiting, loading]
    assert coordinator.lost == [1, 3], "who died, or is another one now"
    assert set(table.actors) == {serving, waiting, loading, "coordinator-configuration"}
    assert set(table.reserved) == {serving, waiting, loading, "of somebody else"}


def test_what_this_manager_has_placed_is_no_stray_until_it_is_ended(table: Table) -> None:
    async def scenario() -> None:
        ours = made(FakeCoordinator(), table)
        handle = ours.plan(3)
        table.actors[handle.name] = says(3, 1)
        table.reserved.append(handle.name)
        handle.actor = handle.group = handle.name
        assert not await ours.end_strays() and table.ended == []
        ours._destroy(handle)  # and Ray has not heard it
        assert await ours.end_strays() and not table.actors and not table.reserved

    asyncio.run(scenario())


def test_names_differ_with_each_start(table: Table) -> None:
    ours = made(FakeCoordinator(), table)
    assert len({ours.plan(0).name for _ in range(50)}) == 50


def test_strays_that_do_not_go_hold_up_a_start_for_some_time_only(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_STRAYS_TIMEOUT_S", 0.05)
    stuck = table.engine(0, "a", DEAD)
    table.listings_until_gone = None
    ours = made(FakeCoordinator(), table)
    assert asyncio.run(ours.end_strays()) and stuck in table.actors
    assert ours.strays_left, "they hold resources that nobody else gives back"
    table.listings_until_gone = 0
    asyncio.run(ours.end_strays())
    assert not ours.strays_left and stuck not in table.actors


@pytest.mark.parametrize(
    ("error", "permanent", "text"),
    [
        (ActorRaised(ConfigError("no such model")), True, "no such model"),
        (ActorRaised(RuntimeError("first line\nlast line")), False, "RuntimeError: last line"),
        (ActorRaised(ActorDied("a worker")), False, "its process ended"),
        (ActorDied("the engine"), False, "its process ended"),
        (ActorUnavailable("the engine"), False, "its process ended"),
        (GcsUnavailable("no answer"), False, "GcsUnavailable: no answer"),
        (TimeoutError(), False, "was not ready after cluster.start_timeout_s"),
    ],
)
def test_a_start_that_fails_leaves_nothing_and_says_why(
    table: Table, error: Exception, permanent: bool, text: str
) -> None:
    async def scenario() -> None:
        ours = made(FakeCoordinator(), table)
        handle = ours.plan(3)
        table.created = error
        with pytest.raises(StartFailed, match=text) as caught:
            await ours.start(handle)
        assert caught.value.permanent == permanent
        assert table.ended == [handle.name, handle.name], "the actor and its group"

    asyncio.run(scenario())


def test_a_start_without_room_says_what_is_free(table: Table) -> None:
    async def scenario() -> None:
        ours = made(FakeCoordinator(), table)
        handle = ours.plan(3)
        table.resources, table.has_room = {"CPU": 0.25}, False
        with pytest.raises(StartFailed, match=r"no room for engine 3: .* free: 0.25 CPU") as caught:
            await ours.start(handle)
        assert not caught.value.permanent and handle.actor is None
        assert table.ended == [handle.name]
        assert "50 workers need 0.5 CPU" in (ours.refusal(50) or "") and not ours.refusal(20)

    asyncio.run(scenario())


@pytest.mark.parametrize(("node", "killed"), [("node", [7]), ("another", [])])
def test_a_process_of_this_host_is_killed_at_once(
    table: Table, node: str, killed: list[int]
) -> None:
    async def scenario() -> None:
        ours = made(FakeCoordinator(), table)
        handle = ours.plan(3)
        handle.actor = handle.group = handle.name
        handle.ready = msgspec.structs.replace(says(3, 1), node=node)
        await ours.kill(handle)
        assert (table.killed_pids, table.ended) == (killed, [handle.name, handle.name])

    asyncio.run(scenario())
