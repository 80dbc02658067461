"""The lives of engines, decided without Ray: a scripted placement, and time that only jumps."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from swell.cluster import manager as module
from swell.cluster.manager import ClusterManager, ScaleRefused
from swell.cluster.placement import EngineHandle, StartFailed
from swell.configs.schema import load
from swell.coordinator import roster
from swell.coordinator.channel import ChannelAddress
from swell.coordinator.roster import Member, MemberState, Roster
from swell.coordinator.wire import ClusterView, EngineReport
from swell.engine.actor import EngineReady
from swell.engine.executor import ExecutorLimits, WorkerInfo

START_S = 10.0
"""Virtual seconds until a fake engine is ready."""


class _JumpingSelector(selectors.DefaultSelector):
    """Waits for nothing: a wait moves the clock to its end. To wait for ever is a deadlock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise AssertionError("everybody waits for everybody")
        if not ready:
            self.now += timeout or 0.0
        return ready


class _JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


class FakePlacement:
    """What `Placement` promises, with engines that do as they are told."""

    contact = None
    coordinator_pid = 77

    def __init__(self) -> None:
        self.roster = Roster()
        self.reports: dict[int, EngineReport] = {}
        self.alive: dict[int, EngineHandle] = {}
        self.events: list[tuple[str, list[int]]] = []
        self.failures: dict[int, list[StartFailed]] = {}
        """What the next starts of a rank raise."""
        self.always: StartFailed | None = None
        self.starting = 0
        self.most_starting = 0
        self._ends: dict[int, asyncio.Future[str]] = {}

    async def open(self) -> None:
        self.events.append(("open", []))

    async def view(self) -> ClusterView:
        return ClusterView(self.roster, list(self.reports.values()))

    async def join(self, members: list[Member]) -> None:
        self.roster = roster.join(self.roster, members)
        self._note("join", [member.rank for member in members])

    async def leave(self, ranks: list[int]) -> None:
        self.roster = roster.leave(self.roster, ranks)
        self._note("leave", ranks)

    async def remove(self, ranks: list[int]) -> None:
        self.roster = roster.remove(self.roster, ranks)
        self._note("remove", ranks)

    async def adopt(self) -> list[EngineHandle]:
        handles = []
        for member in self.roster.members:
            handle = self.plan(member.rank)
            handle.leaving = member.state is MemberState.LEAVING
            self._born(handle)
            handles.append(handle)
        return handles

    def plan(self, rank: int) -> EngineHandle:
        return EngineHandle(rank)

    async def start(self, handle: EngineHandle) -> None:
        self._note("start", [handle.rank])
        self.starting += 1
        self.most_starting = max(self.most_starting, self.starting)
        try:
            await asyncio.sleep(START_S)
        finally:
            self.starting -= 1
        failure = self.always or next(iter(self.failures.get(handle.rank, [])), None)
        if failure is not None:
            if not self.always:
                del self.failures[handle.rank][0]
            raise failure
        assert handle.rank not in self.alive, "two engines of one rank"
        self._born(handle)

    async def ended(self, handle: EngineHandle) -> str:
        return await asyncio.shield(self._ends[handle.rank])

    async def end(self, handle: EngineHandle) -> None:
        if handle.watcher is not None and handle.watcher is not asyncio.current_task():
            handle.watcher.cancel()
        if self.alive.get(handle.rank) is handle:
            del self.alive[handle.rank]
            self._note("end", [handle.rank])

    async def close(self, handles: list[EngineHandle]) -> None:
        for handle in handles:
            await self.end(handle)
        self.events.append(("close", []))

    def die(self, rank: int) -> None:
        self._ends[rank].set_result("it was killed")

    def did(self, name: str) -> list[list[int]]:
        return [ranks for event, ranks in self.events if event == name]

    def _born(self, handle: EngineHandle) -> None:
        handle.ready = EngineReady(
            handle.rank,
            ChannelAddress("machine", f"ipc://@{handle.rank}", "tcp://127.0.0.1:1"),
            ExecutorLimits(10, 100, 50),
            pid=1000 + handle.rank,
            node="node",
            workers=[WorkerInfo(0, 0, 0, 2000 + handle.rank)],
        )
        self.alive[handle.rank] = handle
        self._ends[handle.rank] = asyncio.get_running_loop().create_future()

    def _note(self, event: str, ranks: list[int]) -> None:
        self.events.append((event, sorted(ranks)))


class World:
    """A manager and its placement in a loop of jumping time."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.placement = FakePlacement()
        self.manager = ClusterManager(load({"model": {"path": "m"}, **config}), self.placement)

    async def settle(self) -> None:
        """Until nothing changes any more; refuses to wait for ever."""
        quiet = 0
        for _ in range(10_000):
            await asyncio.sleep(0.05)
            quiet = quiet + 1 if self.manager.phase in ("idle", "failed") else 0
            if quiet == 40:
                return
        raise AssertionError(f"still in phase {self.manager.phase!r}")

    async def start(self) -> None:
        await self.manager.start()
        await self.settle()

    @property
    def active(self) -> list[int]:
        """Ranks that clients are sent to; an engine behind each."""
        ranks = [m.rank for m in self.placement.roster.members if m.state is MemberState.ACTIVE]
        assert set(ranks) <= set(self.placement.alive)
        return ranks


Scenario = Callable[[World], Awaitable[None]]


@pytest.fixture
def live(monkeypatch) -> Callable[..., World]:
    """Runs a scenario, stops the manager, and looks that nothing was left."""

    def run(scenario: Scenario, *, data: int = 1, **cluster: Any) -> World:
        loop = _JumpingLoop()
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=loop.time))
        world = World({"parallel": {"data": data}, "cluster": cluster})

        async def whole() -> None:
            await scenario(world)
            await world.manager.stop()
            await asyncio.sleep(0)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, "tasks were left"
            assert not world.placement.alive, "engines were left"

        try:
            loop.run_until_complete(whole())
        finally:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()
        return world

    return run


def transient(text: str = "no room") -> StartFailed:
    return StartFailed(text, permanent=False)


def permanent(text: str = "no such model") -> StartFailed:
    return StartFailed(text, permanent=True)


def busy(rank: int) -> EngineReport:
    return EngineReport(rank, running=1)


# -------------------------------------------------------------------------------- growing


def test_engines_start_beside_each_other_and_join_in_one_epoch(live) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        assert world.active == [0, 1, 2] and world.placement.roster.epoch == 1
        assert world.manager.phase == "idle" and world.manager.error is None

    world = live(scenario, data=3)
    assert world.placement.most_starting == 3
    assert world.placement.events[0] == ("open", [])


def test_scale_up_keeps_those_that_serve(live) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        first = world.placement.alive[0]
        world.manager.scale(3)
        assert world.manager.phase == "prepare"
        await asyncio.sleep(START_S / 2)
        assert world.active == [0], "newcomers joined before they were ready"
        await world.settle()
        assert world.active == [0, 1, 2] and world.placement.alive[0] is first
        assert world.manager.target == 3 and world.manager.phase == "idle"

    live(scenario)


def test_a_newcomer_takes_the_lowest_free_rank(live) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.manager.drain(1)
        await world.settle()
        assert world.active == [0, 2]
        world.manager.scale(4)
        await world.settle()
        assert world.active == [0, 1, 2, 3]

    live(scenario, data=3)


# -------------------------------------------------------------------------------- shrinking


def test_scale_down_leaves_then_removes_then_ends_the_highest_ranks(live) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.placement.events.clear()
        world.manager.scale(1)
        assert world.manager.phase == "drain"
        await world.settle()
        assert world.active == [0] and list(world.placement.alive) == [0]
        names = [name for name, _ in world.placement.events]
        assert names == ["leave", "remove", "end", "end"]
        assert world.placement.did("leave") == world.placement.did("remove") == [[1, 2]]

    live(scenario, data=3)


def test_a_leaving_engine_finishes_its_requests_first(live) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.placement.reports[1] = busy(1)
        world.manager.scale(1)
        await asyncio.sleep(20)
        assert world.active == [0] and 1 in world.placement.roster.ranks
        assert 1 in world.placement.alive and world.manager.phase == "drain"
        world.placement.reports[1] = EngineReport(1, waiting=1)
        await asyncio.sleep(5)
        assert 1 in world.placement.alive, "a waiting request is one, too"
        world.placement.reports[1] = EngineReport(1)
        await world.settle()
        assert 1 not in world.placement.alive

    live(scenario, data=2, drain_timeout_s=30)


def test_one_quiet_look_is_not_enough(live) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.placement.reports[1] = busy(1)
        world.manager.scale(1)
        await asyncio.sleep(1.25)
        for running in (0, 1) * 4:  # what each look sees
            world.placement.reports[1] = EngineReport(1, running=running)
            await asyncio.sleep(0.5)
        assert 1 in world.placement.alive

    live(scenario, data=2, load_report_s=0.25)


@pytest.mark.parametrize(("asked", "seconds"), [(None, 30), (5.0, 5)])
def test_the_drain_time_is_a_limit(live, asked, seconds) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.placement.reports[1] = busy(1)
        world.manager.scale(1, asked)
        await asyncio.sleep(seconds - 1)
        assert 1 in world.placement.alive
        await asyncio.sleep(2)
        assert 1 not in world.placement.alive
        await world.settle()
        assert world.manager.phase == "idle"

    live(scenario, data=2, drain_timeout_s=30)


def test_drain_takes_the_engine_that_was_named(live) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.manager.drain(0)
        await world.settle()
        assert world.active == [1, 2] and world.manager.target == 2
        with pytest.raises(ScaleRefused, match=r"no engine 0; engines: \[1, 2\]"):
            world.manager.drain(0)

    live(scenario, data=3)


def test_a_drain_that_is_refused_marks_nobody(live) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        with pytest.raises(ScaleRefused, match="min_engines=2"):
            world.manager.drain(0)
        world.manager.scale(3)
        await world.settle()
        world.manager.scale(2)
        await world.settle()
        assert world.active == [0, 1]

    live(scenario, data=2, min_engines=2)


# -------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("engines", [0, -1, 5])
def test_a_target_out_of_range_is_refused(live, engines) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        with pytest.raises(ScaleRefused, match=rf"={engines} .*=1 .*max_engines=4") as caught:
            world.manager.scale(engines)
        assert not caught.value.conflict
        assert (world.manager.target, world.manager.phase) == (2, "idle")
        await world.settle()
        assert world.active == [0, 1]

    live(scenario, data=2, max_engines=4)


def test_a_change_during_a_change_is_a_conflict(live) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        for target, phase in [(3, "prepare"), (1, "drain")]:
            world.manager.scale(target)
            for pause_s in (0, 0.01):
                with pytest.raises(ScaleRefused, match=phase) as caught:
                    world.manager.scale(2)
                assert caught.value.conflict and world.manager.target == target
                await asyncio.sleep(pause_s)
            await world.settle()
            assert len(world.active) == target

    live(scenario)


# -------------------------------------------------------------------------------- failing


def test_a_start_that_can_never_succeed_is_not_repeated(live) -> None:
    async def scenario(world: World) -> None:
        world.placement.always = permanent("model.path='m' is no folder")
        await world.start()
        assert world.manager.phase == "failed"
        assert world.manager.error == "model.path='m' is no folder"
        assert await world.manager.waiting_for() == (world.manager.error, True)
        described = await world.manager.describe()
        assert described["state"] == "failed" and described["engines"] == []
        assert described["rescale"] == {"phase": "failed", "error": world.manager.error}
        assert world.placement.did("start") == [[0]]

    live(scenario)


def test_repeated_failure_stops_after_the_limit(live) -> None:
    async def scenario(world: World) -> None:
        world.placement.always = transient("out of memory")
        await world.start()
        assert len(world.placement.did("start")) == module._MAX_FAILURES
        await asyncio.sleep(10_000)
        assert len(world.placement.did("start")) == module._MAX_FAILURES
        assert await world.manager.waiting_for() == ("out of memory", True)
        world.placement.always = None
        world.manager.scale(1)
        await world.settle()
        assert world.active == [0] and world.manager.phase == "idle"

    live(scenario)


def test_a_failure_that_passes_is_forgotten(live) -> None:
    async def scenario(world: World) -> None:
        world.placement.failures = {0: [transient(), transient()]}
        await world.manager.start()
        await asyncio.sleep(START_S + 0.01)
        assert not (await world.manager.waiting_for())[1], "not in vain: it is tried again"
        await world.settle()
        assert world.active == [0] and world.placement.did("start") == [[0]] * 3
        assert (world.manager.phase, world.manager.error) == ("idle", None)

    live(scenario)


def test_a_failed_grow_leaves_the_old_epoch_serving(live) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        before = world.placement.roster
        world.placement.failures = {2: [transient("no room for it")]}
        world.manager.scale(3)
        await world.settle()
        assert world.placement.roster is before and world.active == [0, 1]
        assert (world.manager.phase, world.manager.target) == ("failed", 2)
        described = await world.manager.describe()
        assert described["state"] == "serving"
        assert described["rescale"] == {"phase": "failed", "error": "no room for it"}
        world.manager.scale(3)
        assert world.manager.error is None
        await world.settle()
        assert world.active == [0, 1, 2] and world.manager.phase == "idle"

    live(scenario, data=2)


def test_of_a_half_failed_grow_the_good_half_serves(live) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.placement.failures = {1: [transient("bad luck")]}
        world.manager.scale(3)
        await world.settle()
        assert world.active == [0, 2] and world.manager.target == 2
        assert (world.manager.phase, world.manager.error) == ("failed", "bad luck")

    live(scenario)


def test_to_ask_for_what_is_ends_a_failed_change(live) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.placement.failures = {1: [transient()]}
        world.manager.scale(2)
        await world.settle()
        assert world.manager.phase == "failed"
        world.manager.scale(1)
        await world.settle()
        assert (world.manager.phase, world.manager.error) == ("idle", None)
        assert world.active == [0]

    live(scenario)


# -------------------------------------------------------------------------------- dying


def test_a_dead_engine_is_removed_at_once_and_replaced(live) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        epoch, others = world.placement.roster.epoch, [world.placement.alive[r] for r in (0, 2)]
        world.placement.events.clear()
        world.placement.die(1)
        await asyncio.sleep(0.01)
        assert world.active == [0, 2] and world.placement.roster.epoch == epoch + 1
        await world.settle()
        assert world.active == [0, 1, 2] and world.manager.phase == "idle"
        assert [world.placement.alive[r] for r in (0, 2)] == others
        names = [name for name, _ in world.placement.events]
        assert names == ["remove", "end", "start", "join"]

    live(scenario, data=3)


def test_all_engines_may_die_together_and_again(live) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        for _ in range(2 * module._MAX_FAILURES):
            for rank in (0, 1):
                world.placement.die(rank)
            await world.settle()
            assert world.active == [0, 1]

    live(scenario, data=2)


def test_an_engine_that_dies_while_others_start_is_replaced(live) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.manager.scale(3)
        await asyncio.sleep(START_S / 2)
        world.placement.die(0)
        await world.settle()
        assert world.active == [0, 1, 2] and world.manager.phase == "idle"

    live(scenario, data=2)


@pytest.mark.parametrize("dying", [0, 2])
def test_an_engine_that_dies_while_others_leave(live, dying) -> None:
    """Rank 2 leaves. Whoever dies meanwhile, two serve in the end."""

    async def scenario(world: World) -> None:
        await world.start()
        world.placement.reports[2] = busy(2)
        world.manager.scale(2)
        await asyncio.sleep(1)
        world.placement.die(dying)
        world.placement.reports.clear()
        await world.settle()
        assert world.active == [0, 1] and world.manager.phase == "idle"
        assert world.placement.roster.ranks == [0, 1]

    live(scenario, data=3)


def test_a_replacement_that_fails_is_tried_up_to_the_limit(live) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.placement.events.clear()
        world.placement.always = transient("no room")
        world.placement.die(0)
        await world.settle()
        assert (world.manager.phase, world.manager.error) == ("failed", "no room")
        assert len(world.placement.did("start")) == module._MAX_FAILURES

    live(scenario)


def test_an_engine_that_dies_after_a_failed_grow_is_replaced(live) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.placement.failures = {2: [transient()]}
        world.manager.scale(3)
        await world.settle()
        world.placement.die(0)
        await world.settle()
        assert world.active == [0, 1]

    live(scenario, data=2)


# -------------------------------------------------------------------------------- managers


def test_a_new_manager_adopts_what_serves(live) -> None:
    async def scenario(world: World) -> None:
        members = [Member(rank, ChannelAddress("m", "i", "t")) for rank in (0, 2, 3)]
        world.placement.roster = before = roster.join(Roster(), members)
        await world.start()
        assert world.placement.roster is before and world.placement.did("start") == []
        assert (world.manager.target, world.manager.phase) == (3, "idle")
        world.placement.die(2)
        await world.settle()
        assert world.active == [0, 1, 3]
        world.manager.scale(1)
        await world.settle()
        assert world.active == [0]

    live(scenario, data=1)


def test_a_new_manager_goes_on_with_a_drain(live) -> None:
    """The old one was lost while rank 1 was leaving: it leaves, and does not come back."""

    async def scenario(world: World) -> None:
        members = [Member(rank, ChannelAddress("m", "i", "t")) for rank in (0, 1)]
        world.placement.roster = roster.leave(roster.join(Roster(), members), [1])
        await world.start()
        assert world.active == world.placement.roster.ranks == [0]
        assert world.manager.target == 1 and list(world.placement.alive) == [0]

    live(scenario)


def test_stop_ends_engines_that_are_still_starting(live) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.manager.scale(3)
        await asyncio.sleep(START_S / 2)

    world = live(scenario)
    assert world.placement.starting == 0 and world.placement.events[-1] == ("close", [])


def test_describe_holds_what_the_contract_names(live) -> None:
    async def scenario(world: World) -> None:
        await world.manager.start()
        await asyncio.sleep(START_S / 2)
        described = await world.manager.describe()
        assert described["state"] == "starting"
        assert [(e["rank"], e["state"]) for e in described["engines"]] == [
            (0, "starting"),
            (1, "starting"),
        ]
        text, failed = await world.manager.waiting_for()
        assert "engine 0: " in text and "engine 1: " in text and not failed
        await world.settle()
        world.placement.reports[1] = EngineReport(1, running=2, waiting=3, kv_usage=0.5, steps=9)
        described = await world.manager.describe()
        assert described["engines"][1] == {
            "rank": 1,
            "state": "active",
            "pid": 1001,
            "node": "node",
            "running": 2,
            "waiting": 3,
            "kv_usage": 0.5,
            "steps": 9,
            "workers": [{"rank": 0, "tensor": 0, "pipeline": 0, "pid": 2001}],
        }
        del described["engines"]
        assert described == {
            "epoch": 1,
            "wave": 0,
            "state": "serving",
            "target": 2,
            "coordinator": {"pid": 77},
            "rescale": {"phase": "idle", "error": None},
        }

    live(scenario, data=2)


def test_describe_says_when_the_cluster_changes(live) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.placement.reports[1] = busy(1)
        world.manager.scale(1)
        await asyncio.sleep(1)
        described = await world.manager.describe()
        assert described["state"] == "changing"
        assert [e["state"] for e in described["engines"]] == ["active", "leaving"]

    live(scenario, data=2)
