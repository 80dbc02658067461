"""The actors and groups that a manager finds in Ray when it starts, and what it does with them. Ray
is a table here, whose rows disappear some time after removal."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from swell.cluster.control.engines import orphans, placement
from swell.cluster.control.engines.actor_names import EngineName, engine_tag
from swell.cluster.control.engines.engine_handle import StartFailed
from swell.cluster.control.engines.placement import Placement
from swell.cluster.control.plan.versions import Version
from swell.cluster.control.ray.actor_errors import (
    ActorDied,
    ActorRaised,
    ActorUnavailable,
    GcsUnavailable,
)
from swell.configs.schema import ConfigError, load
from swell.coordinator.manager_state import ManagerId, NotLeading
from swell.coordinator.roster import Member, Roster
from swell.coordinator.service import Membership
from swell.coordinator.state_machine import StalledEngine
from swell.coordinator.transport.channel import ChannelAddress
from swell.coordinator.transport.runtime import ThreadRuntime
from swell.coordinator.wire import ClusterView
from swell.engine.executor import ExecutorLimits
from swell.engine.serving.actor_results import EngineReady
from swell.engine.serving.start_timeline import StartPhase
from tests.cluster.control.ray.fake_ray import KEYS, FakeRay

VERSION = Version.of(1, "configuration", load({"model": {"path": "m"}}))
TAG = engine_tag(VERSION.name, KEYS.public.hex())
ADDRESS = ChannelAddress("m", "i", "t")
LOADING = ActorRaised(RuntimeError("it still loads"))
DEAD = ActorDied("its process ended")


def name(rank: int, start: str, tag: str = TAG) -> str:
    return str(EngineName("swell-app", rank, tag, start))


class Table(FakeRay):
    """Engines and their answers. Engines and their groups take a while to disappear."""

    async def _answer(self, actor: str, method: str, args: tuple[Any, ...]) -> Any:
        if method == "adopt" and self.actors.get(actor) is LOADING:
            return VERSION.name
        answer = await super()._answer(actor, method, args)
        return answer.version if method == "adopt" else answer

    def engine(
        self, rank: int, start: str, answer: Any, *, tag: str = TAG, group: bool = True
    ) -> str:
        text = name(rank, start, tag)
        self.actors[text] = answer
        if group:
            self.reserved.append(text)
        return text


class FakeCoordinator:
    """The part of a `CoordinatorHandle` that `Placement` uses."""

    name = "coordinator-configuration"
    manager_id = staticmethod(lambda: ManagerId("owner", 1))
    contact = SimpleNamespace(keys=KEYS, address=ADDRESS)

    def __init__(self, *members: Member) -> None:
        self.roster = Roster(1, members)
        self.stalled: list[StalledEngine] = []
        self.lost: list[int] = []

    async def view(self) -> ClusterView:
        return ClusterView(self.roster)

    async def membership(self) -> Membership:
        return Membership(await self.view(), self.stalled)

    async def remove_failed(self, ranks: list[int], _incarnations: list[int] | None = None) -> None:
        self.lost += ranks


def ready_answer(rank: int, incarnation: int) -> EngineReady:
    limits = ExecutorLimits(10, 100, 50)
    return EngineReady(rank, ADDRESS, limits, 7, "node", [], incarnation, version=VERSION.name)


def member(rank: int, incarnation: int) -> Member:
    return Member(rank, ADDRESS, incarnation=incarnation)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    monkeypatch.setattr(placement, "_POLL_S", 0.0)
    monkeypatch.setattr(orphans, "_POLL_S", 0.0)
    return Table()


def made(coordinator: FakeCoordinator, ray: FakeRay, **settings: object) -> Placement:
    config = load({"model": {"path": "m"}}, settings)
    return Placement(
        config,
        "swell-app",
        coordinator,  # type: ignore[arg-type]
        ray,
        ThreadRuntime(),
        always,
    )


async def always() -> bool:
    """Lets this manager terminate engines."""
    return True


def ignore() -> None:
    """Does nothing when an engine waits for room."""


def test_serving_loading_and_waiting_engines_are_adopted_and_others_killed(table: Table) -> None:
    serving = table.engine(0, "a", ready_answer(0, 5))
    table.engine(0, "b", LOADING)
    waiting = table.engine(1, "c", ready_answer(1, 6))
    loading = table.engine(2, "d", LOADING)
    table.engine(3, "e", DEAD)
    table.engine(4, "f", ready_answer(4, 8), tag=engine_tag("another", KEYS.public.hex()))
    table.engine(5, "g", ready_answer(5, 9), group=False)
    table.reserved += [name(6, "h"), "swell-app-engine-7", "of somebody else"]
    table.actors["coordinator-configuration"] = table.actors["coordinator-another"] = DEAD
    coordinator = FakeCoordinator(member(0, 5), member(1, 3), member(3, 7))
    adopted, newcomers, _ = asyncio.run(made(coordinator, table).adopt([VERSION]))
    assert [handle.name for handle in adopted] == [serving]
    assert [handle.name for handle in newcomers] == [waiting, loading]
    assert coordinator.lost == [1, 3], "who died, or is another one now"
    assert set(table.actors) == {serving, waiting, loading, "coordinator-configuration"}
    assert set(table.reserved) == {serving, waiting, loading, "of somebody else"}


def test_an_engine_that_the_coordinator_has_found_stalled_is_killed(table: Table) -> None:
    table.engine(0, "a", ready_answer(0, 5))
    serving = table.engine(1, "b", ready_answer(1, 6))
    coordinator = FakeCoordinator(member(1, 6))
    coordinator.stalled = [StalledEngine(0, 5, "it made no progress")]
    adopted = asyncio.run(made(coordinator, table).adopt([VERSION]))
    assert [handle.name for handle in adopted.serving] == [serving] and adopted.newcomers == []
    assert set(table.actors) == {serving}


@pytest.mark.parametrize("is_listed", [True, False])
def test_an_unresponsive_engine_in_the_roster_is_asked_again(
    table: Table, monkeypatch: pytest.MonkeyPatch, is_listed: bool
) -> None:
    """A silent engine is probed again while it is in the roster: the coordinator removes an engine
    that has stopped."""
    serving = table.engine(0, "a", ready_answer(0, 5))
    answer, asked = table._answer, 0

    async def slow_answer(actor: str, method: str, args: tuple[Any, ...]) -> Any:
        nonlocal asked
        asked += 1
        if asked <= 2:
            raise TimeoutError
        return await answer(actor, method, args)

    monkeypatch.setattr(table, "_answer", slow_answer)
    coordinator = FakeCoordinator(*([member(0, 5)] if is_listed else []))
    adopted, newcomers, _ = asyncio.run(made(coordinator, table).adopt([VERSION]))
    assert [handle.name for handle in adopted] == ([serving] if is_listed else [])
    assert newcomers == []


def test_an_engine_that_joins_while_others_are_asked_is_serving(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted coordinator treats each engine that reports to it as a member."""
    loading, silent = table.engine(0, "a", LOADING), table.engine(1, "b", ready_answer(1, 6))
    coordinator, answer, asked = FakeCoordinator(member(1, 6)), table._answer, 0

    async def slow_answer(actor: str, method: str, args: tuple[Any, ...]) -> Any:
        nonlocal asked
        asked += actor == silent
        if actor == silent and asked <= 2:
            raise TimeoutError
        if actor == silent:
            table.actors[loading] = ready_answer(0, 5)
            coordinator.roster = Roster(2, (member(0, 5), member(1, 6)))
        return await answer(actor, method, args)

    monkeypatch.setattr(table, "_answer", slow_answer)
    adopted, newcomers, _ = asyncio.run(made(coordinator, table).adopt([VERSION]))
    assert [handle.name for handle in adopted] == [loading, silent]
    assert newcomers == [] and coordinator.lost == []


def test_an_engine_that_never_answers_is_abandoned(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_PROBES", 0.001)
    table.engine(0, "a", TimeoutError())
    coordinator = FakeCoordinator(member(0, 5))
    assert asyncio.run(made(coordinator, table).adopt([VERSION])) == (
        [],
        [],
        [],
    ) and coordinator.lost == [0]


def test_an_engine_of_this_manager_becomes_an_orphan_only_when_it_is_destroyed(
    table: Table,
) -> None:
    async def scenario() -> None:
        ours = made(FakeCoordinator(), table)
        handle = ours.plan(3, VERSION)
        table.actors[handle.name] = ready_answer(3, 1)
        table.reserved.append(handle.name)
        handle.actor = handle.group = handle.name
        assert not await ours.orphans.collect() and table.ended == []
        await ours._destroy(handle)  # Ray does not receive it
        assert await ours.orphans.collect() and not table.actors and not table.reserved

    asyncio.run(scenario())


def test_names_differ_with_each_start(table: Table) -> None:
    ours = made(FakeCoordinator(), table)
    assert len({ours.plan(0, VERSION).name for _ in range(50)}) == 50


def test_orphans_delay_a_start_for_a_limited_time(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphans, "_TIMEOUT_S", 0.05)
    stuck = table.engine(0, "a", DEAD)
    table.listings_until_gone = None

    async def scenario() -> None:
        ours = made(FakeCoordinator(), table)
        assert await ours.orphans.collect() and stuck in table.actors
        left = ours.orphans.leftovers()
        assert left is not None and left.names == [stuck] and left.failures == 1
        table.listings_until_gone = 0
        await ours.orphans.collect()
        assert ours.orphans.leftovers() is None and stuck not in table.actors

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("error", "permanent", "text"),
    [
        (ActorRaised(ConfigError("no such model")), True, "no such model"),
        (ActorRaised(RuntimeError("first line\nlast line")), False, "RuntimeError: last line"),
        (ActorRaised(ActorDied("a worker")), False, "its process terminated"),
        (ActorDied("the engine"), False, "its process terminated"),
        (ActorRaised(ActorUnavailable("a worker")), False, "its process terminated"),
        (GcsUnavailable("no answer"), False, "GcsUnavailable: no answer"),
        (TimeoutError(), False, "was not ready after cluster.start_timeout_s"),
    ],
)
def test_a_failed_start_leaves_nothing_and_reports_the_reason(
    table: Table, error: Exception, permanent: bool, text: str
) -> None:
    async def scenario() -> None:
        ours = made(FakeCoordinator(), table)
        handle = ours.plan(3, VERSION)
        table.created = error
        with pytest.raises(StartFailed, match=text) as caught:
            await ours.start(handle, ignore)
        assert caught.value.permanent == permanent
        assert table.ended == [handle.name, handle.name], "the actor and its group"

    asyncio.run(scenario())


def test_an_engine_is_asked_again_while_the_connection_to_it_breaks(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken connection does not show that the engine is dead: Ray says so later."""
    broken, answer = {"start", "adopt", "ready", "ended"}, table._answer

    async def break_once(actor: str, method: str, args: tuple[Any, ...]) -> Any:
        if method in broken:
            broken.remove(method)
            raise ActorUnavailable("the connection broke")
        return DEAD.args[0] if method == "ended" else await answer(actor, method, args)

    async def scenario() -> None:
        monkeypatch.setattr(table, "_answer", break_once)
        table.engine(0, "a", ready_answer(0, 5))
        ours = made(FakeCoordinator(), table)
        _, [adopted], _ = await ours.adopt([VERSION])
        assert adopted.ready == ready_answer(0, 5), "it has loaded, and is no member"
        await ours.start(adopted, ignore)
        assert await ours.ended(adopted) == DEAD.args[0]
        assert broken == set() and table.ended == []

    asyncio.run(scenario())


def test_the_time_of_a_process_is_what_its_phases_leave(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same process loads other weights later, and keeps the time."""
    create = table.create_engine

    async def create_slowly(*args: Any, **engine: Any) -> str:
        await asyncio.sleep(0.05)
        return await create(*args, **engine)

    async def scenario() -> None:
        ours = made(FakeCoordinator(), table)
        for loading_s, least_s, most_s in ((0.0, 0.05, math.inf), (1e6, 0.0, 0.0)):
            phases = [StartPhase("loading weights", loading_s)]
            table.created = msgspec.structs.replace(ready_answer(3, 1), start=phases)
            handle = ours.plan(3, VERSION)
            await ours.start(handle, ignore)
            assert handle.process_s is not None and least_s <= handle.process_s <= most_s
            assert handle.reloading(VERSION).process_s == handle.process_s

    monkeypatch.setattr(table, "create_engine", create_slowly)
    asyncio.run(scenario())


def test_a_start_without_room_reports_the_free_resources(table: Table) -> None:
    async def scenario() -> None:
        ours = made(FakeCoordinator(), table)
        handle = ours.plan(3, VERSION)
        table.resources, table.has_room = {"CPU": 0.25}, False
        with pytest.raises(StartFailed, match=r"no room for engine 3: .* free: 0.25 CPU") as caught:
            await ours.start(handle, ignore)
        assert not caught.value.permanent and handle.actor is None
        assert table.ended == [handle.name]
        assert "50 workers need 0.5 CPU" in (await ours.refusal(VERSION, 50) or "")
        assert await ours.refusal(VERSION, 20) is None
        table.is_gcs_away = True
        assert await ours.refusal(VERSION, 50) is None, "who knows"

    asyncio.run(scenario())


@pytest.mark.parametrize("node", ["node", "another"])
def test_a_process_is_killed_at_once_on_any_host(table: Table, node: str) -> None:
    async def scenario() -> None:
        ours = made(FakeCoordinator(), table)
        handle = ours.plan(3, VERSION)
        handle.actor = handle.group = handle.name
        handle.ready = msgspec.structs.replace(ready_answer(3, 1), node=node)
        await ours.kill(handle)
        assert table.killed_pids == [(7, node)]
        assert table.ended == [handle.name, handle.name], "the actor and its group"
        assert list(ours.hang_reports) == [f"{node}:engine 3 hung (7)"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("settings", "bundle", "count"),
    [
        ({"parallel.tensor": 4, "parallel.pipeline": 2}, {"GPU": 4.0}, 2),
        ({"parallel.tensor": 4, "parallel.executor": "inproc"}, {"GPU": 4.0}, 1),
        (
            {"parallel.tensor": 2, "parallel.pipeline": 2, "parallel.executor": "inproc"},
            {"GPU": 4.0},
            1,
        ),
        ({"parallel.pipeline": 3}, {"GPU": 1.0}, 3),
    ],
)
def test_workers_that_must_share_a_host_share_a_bundle(
    table: Table, settings: dict[str, Any], bundle: dict[str, float], count: int
) -> None:
    """Tensor-parallel ranks share a host, and so do all workers of one process. If hosts have
    enough resources only in total, the request is refused with the reason."""

    async def scenario() -> None:
        cuda = load({"model": {"path": "m"}}, {"model.device": "cuda", **settings})
        ours, version = made(FakeCoordinator(), table), Version.of(1, "cuda", cuda)
        table.nodes = [{"GPU": bundle["GPU"]}] * count
        assert await ours.refusal(version, 1) is None
        table.has_room = False
        with pytest.raises(StartFailed):
            await ours.start(ours.plan(0, version), ignore)
        assert table.created_groups == [(bundle, count)]
        if bundle["GPU"] > 1:
            table.nodes = [{"GPU": bundle["GPU"] - 1}] * (2 * count) + [{"CPU": 4.0}]
            assert "must share a host" in (await ours.refusal(version, 1) or "")
            with pytest.raises(StartFailed, match="must share a host") as caught:
                await ours.start(ours.plan(0, version), ignore)
            assert not caught.value.permanent, "a host may join"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("answer", "leads", "is_destroyed"),
    [
        (ActorRaised(NotLeading("it was adopted")), True, False),
        (ActorUnavailable("no answer"), False, False),
        (ActorUnavailable("no answer"), True, True),
        (DEAD, False, True),
        (None, False, True),
    ],
)
def test_an_engine_that_another_manager_has_adopted_is_not_ended(
    table: Table, answer: Any, leads: bool, is_destroyed: bool
) -> None:
    """An engine that has answered its stop, or is dead, has not been adopted."""
    asked: list[None] = []

    async def may_end() -> bool:
        asked.append(None)
        return leads

    async def scenario() -> None:
        ours = made(FakeCoordinator(), table)
        ours.may_end = may_end
        handle = ours.plan(0, VERSION)
        handle.actor = handle.group = table.engine(0, handle.name.rpartition("-")[2], answer)
        await ours.end(handle)
        assert (handle.name in table.ended) is is_destroyed
        assert len(asked) == isinstance(answer, ActorUnavailable)

    asyncio.run(scenario())


@pytest.mark.parametrize("has_ended", [False, True])
@pytest.mark.parametrize("is_adopted", [False, True])
def test_a_cancelled_stop_does_not_end_an_engine_that_another_manager_has_adopted(
    table: Table, monkeypatch: pytest.MonkeyPatch, is_adopted: bool, has_ended: bool
) -> None:
    """The engine has not answered the stop when its manager is cancelled. It refuses the stop if it
    was adopted. Otherwise the collector terminates it, if this manager leads."""
    stopping = asyncio.Event()

    async def no_answer(_actor: str, method: str, _args: tuple[Any, ...]) -> None:
        assert method == "stop"
        stopping.set()
        await asyncio.Event().wait()

    async def leads() -> bool:
        return not is_adopted

    async def scenario() -> None:
        monkeypatch.setattr(table, "_answer", no_answer)
        ours = Placement(
            VERSION.config,
            "swell-app",
            FakeCoordinator(),  # type: ignore[arg-type]
            table,
            ThreadRuntime(),
            leads,
        )
        handle = ours.plan(0, VERSION)
        handle.actor = handle.group = table.engine(0, handle.name.rpartition("-")[2], None)
        ending = asyncio.create_task(ours.end(handle))
        await stopping.wait()
        handle.ended = "its process ended" if has_ended else None
        ending.cancel()
        await asyncio.wait({ending})
        assert ending.cancelled()
        assert (handle.name in table.ended) is has_ended
        await ours.close([])
        assert (handle.name in table.ended) is (has_ended or not is_adopted)

    asyncio.run(scenario())


def test_close_ends_every_engine_that_was_placed(table: Table) -> None:
    """The manager may have been cancelled before it called `end`."""

    async def scenario() -> None:
        ours = made(FakeCoordinator(), table)
        handle = ours.plan(0, VERSION)
        table.engine(0, handle.name.rpartition("-")[2], None)
        await ours.close([])
        assert not table.actors and not table.reserved

    asyncio.run(scenario())
