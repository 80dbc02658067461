"""What a manager finds in Ray when it comes, and what it does with it. Ray is a table here, whose
rows go a while after they were ended."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from swell.cluster.control import placement, strays
from swell.cluster.control.actor_names import EngineName, engine_tag
from swell.cluster.control.placement import Placement
from swell.configs.schema import load
from swell.coordinator.channel import ChannelAddress, ChannelKeys
from swell.coordinator.roster import Member, Roster
from swell.coordinator.wire import ClusterView
from swell.engine.actor import EngineReady
from swell.engine.executor import ExecutorLimits

KEYS = ChannelKeys(b"public", b"secret")
TAG = engine_tag("configuration", KEYS.public.hex())
ADDRESS = ChannelAddress("m", "i", "t")
LOADING = ray.exceptions.RayTaskError("ready", "it still loads", RuntimeError("it still loads"))
DEAD = ray.exceptions.RayActorError()


def name(rank: int, start: str, tag: str = TAG) -> str:
    return str(EngineName("swell-app", rank, tag, start))


class Table:
    """Actors and what they say of themselves; placement groups. Both take some looks to go."""

    def __init__(self) -> None:
        self.actors: dict[str, Any] = {}
        self.groups: dict[str, str] = {}
        self.ended: list[Any] = []
        self._looks_left: dict[str, int] = {}

    def engine(
        self, rank: int, start: str, says: Any, *, tag: str = TAG, group: bool = True
    ) -> str:
        text = name(rank, start, tag)
        self.actors[text] = says
        if group:
            self.groups[text] = f"group of {text}"
        return text

    def actor_names(self, _namespace: str) -> set[str]:
        for text in [text for text, left in self._looks_left.items() if left == 0]:
            self.actors.pop(text, None)
            self.groups.pop(text, None)
        self._looks_left = {text: max(0, left - 1) for text, left in self._looks_left.items()}
        return set(self.actors)

    def group_ids(self, name_filter: Any) -> dict[str, list[str]]:
        return {text: [key] for text, key in self.groups.items() if name_filter(text)}

    def find_actor(self, text: str, _namespace: str) -> Any:
        says = self.actors.get(text)

        async def ready() -> EngineReady:
            if isinstance(says, Exception):
                raise says
            return says

        return SimpleNamespace(text=text, ready=SimpleNamespace(remote=ready))

    def destroy(self, actor: Any, group: Any) -> None:
        for text in (actor and actor.text, group and group.removeprefix("group of ")):
            if text:
                self.ended.append(text)
                self._looks_left.setdefault(text, 2)


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
    made = Table()
    for function in ("actor_names", "group_ids", "find_actor", "destroy"):
        monkeypatch.setattr(strays, function, getattr(made, function))
    monkeypatch.setattr(strays, "group", lambda key: key)
    monkeypatch.setattr(placement, "_POLL_S", 0.0)
    return made


def made(coordinator: FakeCoordinator) -> Placement:
    config = load({"model": {"path": "m"}})
    return Placement(config, "configuration", "swell-app", coordinator)  # type: ignore[arg-type]


def test_what_serves_loads_or_waits_is_adopted_and_all_else_is_ended(table: Table) -> None:
    serving = table.engine(0, "a", says(0, 5))
    table.engine(0, "b", LOADING)
    waiting = table.engine(1, "c", says(1, 6))
    loading = table.engine(2, "d", LOADING)
    table.engine(3, "e", DEAD)
    table.engine(4, "f", says(4, 8), tag=engine_tag("another", KEYS.public.hex()))
    table.engine(5, "g", says(5, 9), group=False)
    table.groups[name(6, "h")] = f"group of {name(6, 'h')}"
    table.groups["swell-app-engine-7"] = "group of swell-app-engine-7"
    table.groups["of somebody else"] = "group of somebody else"
    table.actors["coordinator-configuration"] = table.actors["coordinator-another"] = DEAD
    coordinator = FakeCoordinator(member(0, 5), member(1, 3), member(3, 7))
    adopted, newcomers = asyncio.run(made(coordinator).adopt())
    assert [handle.name for handle in adopted] == [serving]
    assert [handle.name for handle in newcomers] == [waiting, loading]
    assert coordinator.lost == [1, 3], "who died, or is another one now"
    assert set(table.actors) == {serving, waiting, loading, "coordinator-configuration"}
    assert set(table.groups) == {serving, waiting, loading, "of somebody else"}


def test_what_this_manager_has_placed_is_no_stray_until_it_is_ended(table: Table) -> None:
    async def scenario() -> None:
        ours = made(FakeCoordinator())
        handle = ours.plan(3)
        table.actors[handle.name] = says(3, 1)
        table.groups[handle.name] = f"group of {handle.name}"
        assert not await ours.end_strays() and table.ended == []
        ours._destroy(handle)  # and Ray has not heard it
        assert await ours.end_strays() and not table.actors and not table.groups

    asyncio.run(scenario())


def test_names_differ_with_each_start(table: Table) -> None:
    ours = made(FakeCoordinator())
    assert len({ours.plan(0).name for _ in range(50)}) == 50


def test_strays_that_do_not_go_hold_up_a_start_for_some_time_only(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_STRAYS_TIMEOUT_S", 0.05)
    stuck = table.engine(0, "a", DEAD)
    monkeypatch.setattr(strays, "destroy", lambda actor, group: None)
    assert asyncio.run(made(FakeCoordinator()).end_strays()) and stuck in table.actors
