"""A manager without Ray: a scripted placement and coordinator, and time that only jumps."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import Any

from swell.cluster.manager import ClusterManager
from swell.cluster.placement import EngineHandle, StartFailed
from swell.configs.schema import load
from swell.coordinator import roster
from swell.coordinator.channel import ChannelAddress
from swell.coordinator.liveness import Verdict
from swell.coordinator.roster import Member, MemberState, Roster
from swell.coordinator.service import ManagerNote, Membership
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


class FakeCoordinator:
    """What `CoordinatorHandle` promises."""

    contact = None
    pid = 77

    def __init__(self, events: list[tuple[str, list[int]]]) -> None:
        self.events = events
        self.roster = Roster()
        self.reports: dict[int, EngineReport] = {}
        self.verdicts: list[Verdict] = []
        self.kept = ManagerNote()
        self.state = "serving"
        self.group_s = 0.0
        """How long a group takes to form."""
        self.group_fails: str | None = None
        self.silent = False
        self._lost: set[int] = set()
        self._changed = asyncio.Event()

    async def open(self) -> None:
        self.events.append(("open", []))

    async def close(self) -> None:
        self.events.append(("close", []))

    async def view(self) -> ClusterView:
        if self.silent:
            await asyncio.sleep(1e6)
        return ClusterView(self.roster, list(self.reports.values()), state=self.state)

    async def wait(self, epoch: int, timeout_s: float) -> Membership:
        try:
            async with asyncio.timeout(timeout_s):
                while self.roster.epoch == epoch:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        return Membership(await self.view(), list(self.verdicts), self.kept)

    async def join(self, members: list[Member]) -> None:
        ranks = [member.rank for member in members]
        self._lost.clear()
        await asyncio.sleep(self.group_s)
        if self.group_fails or (self.group_s and self._lost & set(ranks)):
            raise RuntimeError(self.group_fails or "it died meanwhile")
        listed = [m for m in members if self.roster.find(m.rank, m.incarnation) is None]
        self._change(roster.join(self.roster, listed), "join", ranks)

    async def leave(self, ranks: list[int]) -> None:
        self._change(roster.leave(self.roster, ranks), "leave", ranks)

    async def part(self, ranks: list[int]) -> None:
        await asyncio.sleep(self.group_s)
        self._change(roster.remove(self.roster, ranks), "part", ranks)

    async def lose(self, ranks: list[int]) -> None:
        self._lost |= set(ranks)
        self._change(roster.remove(self.roster, ranks), "lose", ranks)

    async def hold(self) -> None:
        self.state = "paused"

    async def release(self) -> None:
        self.state = "serving"

    async def take_over(self, owner: str) -> ManagerNote:
        before, self.kept = self.kept, ManagerNote(owner, self.kept.target, self.kept.held)
        return before

    def note(self, note: ManagerNote) -> None:
        if self.kept.owner in ("", note.owner):
            self.kept = note

    def find_stopped(self, rank: int) -> None:
        """The engine does nothing any more, and the coordinator says so."""
        self.verdicts.append(Verdict(rank, f"engine {rank} was silent"))
        self._change(roster.remove(self.roster, [rank]), "stopped", [rank])

    def restart(self, *ranks: int) -> None:
        """It comes back and has heard of these engines; it knows nothing else."""
        known = [m for m in self.roster.members if m.rank in ranks]
        epoch = self.roster.epoch
        active = roster.amend(Roster(0, tuple(known)), ranks, state=MemberState.ACTIVE)
        self.verdicts, self.kept, self.state = [], ManagerNote(), "serving"
        self._change(Roster(epoch + 1, active.members), "restart", list(ranks))

    def _change(self, after: Roster, event: str, ranks: list[int]) -> None:
        self.roster = after
        self.events.append((event, sorted(ranks)))
        self._changed.set()


class FakePlacement:
    """What `Placement` promises, with engines that do as they are told."""

    def __init__(self, coordinator: FakeCoordinator) -> None:
        self.coordinator = coordinator
        self.alive: dict[int, EngineHandle] = {}
        self.events = coordinator.events
        self.failures: dict[int, list[StartFailed]] = {}
        """What the next starts of a rank raise."""
        self.always: StartFailed | None = None
        self.room = 1000
        self.hung: set[int] = set()
        """Engines that answer nothing."""
        self.stillborn: set[int] = set()
        """The next engines of these ranks die as soon as they have started."""
        self.starting = 0
        self.most_starting = 0
        self._births = 0
        self._ends: dict[int, asyncio.Future[str]] = {}

    def refusal(self, engines: int) -> str | None:
        return f"no room for {engines} engines" if engines > self.room else None

    async def adopt(self) -> list[EngineHandle]:
        handles = []
        for member in self.coordinator.roster.members:
            handle = self.plan(member.rank)
            handle.leaving = member.state is MemberState.LEAVING
            self._born(handle, member.incarnation)
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

    async def refresh(self, handle: EngineHandle) -> None:
        if handle.rank in self.hung or self.alive.get(handle.rank) is not handle:
            raise TimeoutError
        self._note("refresh", [handle.rank])

    async def ended(self, handle: EngineHandle) -> str:
        return await asyncio.shield(self._ends[handle.rank])

    async def end(self, handle: EngineHandle) -> None:
        self._end(handle, "end")

    async def kill(self, handle: EngineHandle) -> None:
        self._end(handle, "kill")

    def _end(self, handle: EngineHandle, event: str) -> None:
        if handle.watcher is not None and handle.watcher is not asyncio.current_task():
            handle.watcher.cancel()
        if self.alive.get(handle.rank) is handle:
            del self.alive[handle.rank]
            self.hung.discard(handle.rank)
            self._note(event, [handle.rank])

    async def close(self, handles: list[EngineHandle]) -> None:
        for handle in handles:
            await self.end(handle)

    def die(self, rank: int) -> None:
        self._ends[rank].set_result("it was killed")

    def did(self, name: str) -> list[list[int]]:
        return [ranks for event, ranks in self.events if event == name]

    def _born(self, handle: EngineHandle, incarnation: int | None = None) -> None:
        self._births += 1
        handle.ready = EngineReady(
            handle.rank,
            ChannelAddress("machine", f"ipc://@{handle.rank}", "tcp://127.0.0.1:1"),
            ExecutorLimits(10, 100, 50),
            pid=1000 + handle.rank,
            node="node",
            workers=[WorkerInfo(0, 0, 0, 2000 + handle.rank)],
            incarnation=self._births if incarnation is None else incarnation,
        )
        self.alive[handle.rank] = handle
        self._ends[handle.rank] = asyncio.get_running_loop().create_future()
        if handle.rank in self.stillborn:
            self.stillborn.remove(handle.rank)
            self.die(handle.rank)

    def _note(self, event: str, ranks: list[int]) -> None:
        self.events.append((event, sorted(ranks)))


class World:
    """Managers and what they manage, in a loop of jumping time."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = load({"model": {"path": "m"}, **config})
        self.coordinator = FakeCoordinator([])
        self.placement = FakePlacement(self.coordinator)
        self.manager = self.another()

    def another(self) -> ClusterManager:
        return ClusterManager(self.config, self.coordinator, self.placement)

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
        ranks = [m.rank for m in self.coordinator.roster.members if m.state is MemberState.ACTIVE]
        assert set(ranks) <= set(self.placement.alive)
        return ranks


Scenario = Callable[[World], Awaitable[None]]


def run(scenario: Scenario, *, data: int = 1, **cluster: Any) -> World:
    """Runs a scenario, stops the manager, and looks that nothing was left."""
    loop = _JumpingLoop()
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


def transient(text: str = "no room") -> StartFailed:
    return StartFailed(text, permanent=False)


def permanent(text: str = "no such model") -> StartFailed:
    return StartFailed(text, permanent=True)


def busy(rank: int) -> EngineReport:
    return EngineReport(rank, running=1)
