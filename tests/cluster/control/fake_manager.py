"""A manager without Ray, with a scripted placement and coordinator, in virtual time."""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from swell.cluster.control.cluster_status import Leftovers
from swell.cluster.control.engines import actor_names as names
from swell.cluster.control.engines.actor_names import EngineName
from swell.cluster.control.engines.engine_handle import (
    EngineHandle,
    NoRoom,
    StartFailed,
    WeightsRefused,
)
from swell.cluster.control.engines.placement import Adopted
from swell.cluster.control.manager import ClusterManager
from swell.cluster.control.plan.checkpoint import ClusterCheckpoint
from swell.cluster.control.plan.fleet_view import Intent
from swell.cluster.control.plan.versions import UpgradeStage, Version
from swell.cluster.control.ray.checkpoint_writer import CheckpointWriter
from swell.configs.schema import load
from swell.coordinator import roster
from swell.coordinator.manager_state import DesiredState, ManagerId, ManagerState, NotLeading
from swell.coordinator.roster import Member, MemberState, Roster
from swell.coordinator.service import Membership
from swell.coordinator.state_machine import StalledEngine
from swell.coordinator.transport.channel import ChannelAddress
from swell.coordinator.transport.runtime import ThreadRuntime
from swell.coordinator.wire import ClusterReports, ClusterView, EngineReport
from swell.engine.executor import ExecutorLimits, WorkerInfo
from swell.engine.serving.actor_results import EngineReady, StartStatus

KEYS = "keys"
FIRST = "1-configuration"
"""The first version."""
TAG = names.engine_tag(FIRST, KEYS)
START_S = 10.0
"""Virtual seconds until a fake engine is ready."""
RELOAD_S = 4.0
"""Virtual seconds until an engine has loaded other weights."""
WAIT_FOR_ROOM_S = 600.0
"""Virtual seconds that an engine waits for room if its wait is limited."""
CHECKPOINT_S = 0.01
"""Virtual seconds that the checkpoint store takes to answer."""


class _VirtualTimeSelector(selectors.DefaultSelector):
    """A selector that never blocks: a wait moves the clock to its deadline. An unlimited wait is a
    deadlock and raises AssertionError."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise AssertionError("every task waits for another one")
        if not ready:
            self.now += timeout or 0.0
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual_time = _VirtualTimeSelector()
        super().__init__(self._virtual_time)

    def time(self) -> float:
        return self._virtual_time.now


class FakeCoordinator:
    """A fake `CoordinatorHandle`."""

    contact = None
    pid = 77
    manager_id: Callable[[], ManagerId] = staticmethod(ManagerId)

    def __init__(self, events: list[tuple[str, list[int]]]) -> None:
        self.events = events
        self.roster = Roster()
        self.reports: dict[int, EngineReport] = {}
        """Rank -> report. Engines without an entry report that they are idle."""
        self.unheard: set[int] = set()
        """Engines whose reports stay at an old roster epoch."""
        self.stalled_engines: list[StalledEngine] = []
        self.kept = ManagerState()
        self.state = "serving"
        self.group_s = 0.0
        """Seconds that a group takes to form."""
        self.group_fails: str | None = None
        self.join_raises: Exception | None = None
        self.refused: dict[int, str] = {}
        """Rank -> why the engine does not join its group."""
        self.silent = False
        self.needed: set[str] = set()
        """Versions with which answers have begun."""
        self.gone = False
        """Whether the coordinator actor is permanently dead."""
        self._lost: set[int] = set()
        self._changed = asyncio.Event()

    async def open(self) -> None:
        self.events.append(("open", []))

    async def close(self) -> None:
        self.events.append(("close", []))

    async def view(self) -> ClusterView:
        if self.gone:
            raise RuntimeError("the actor is dead")
        if self.silent:
            await asyncio.sleep(1e6)
        reports = {rank: EngineReport(rank) for rank in self.roster.ranks} | self.reports
        for rank in reports.keys() - self.unheard:
            reports[rank] = msgspec.structs.replace(reports[rank], roster_epoch=self.roster.epoch)
        return ClusterView(
            self.roster, ClusterReports(engines=list(reports.values()), state=self.state)
        )

    async def view_and_contact(self) -> ClusterView:
        return await self.view()

    async def wait(self, epoch: int, timeout_s: float) -> Membership:
        try:
            async with asyncio.timeout(timeout_s):
                while self.roster.epoch == epoch:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        return await self.membership()

    async def join(
        self,
        members: Callable[[], list[Member]],
        ended: Collection[int],
        dead: Callable[[], dict[int, str]],
    ) -> dict[int, str]:
        terminated = dead()
        living = [member for member in members() if member.rank not in terminated]
        return terminated | (await self._join(living) if living else {})

    async def _join(self, members: list[Member]) -> dict[int, str]:
        ranks = [member.rank for member in members]
        self._lost.clear()
        await asyncio.sleep(self.group_s)
        if self.join_raises:
            raise self.join_raises
        if self.group_fails:
            raise RuntimeError(self.group_fails)
        lost = self._lost if self.group_s else set()
        refused = {rank: "it died meanwhile" for rank in ranks if rank in lost} | {
            rank: reason for rank, reason in self.refused.items() if rank in ranks
        }
        found = self.roster
        listed = [m for m in members if found.find(m.rank, m.incarnation) is None]
        joined = [m for m in listed if m.rank not in refused]
        if joined or not refused:
            left = sorted(set(ranks).difference(refused))
            self._change(roster.join(self.roster, joined), "join", left)
        return refused

    async def leave(self, ranks: list[int]) -> int:
        self._change(roster.leave(self.roster, ranks), "leave", ranks)
        return self.roster.epoch

    async def cancel_leave(self, ranks: list[int]) -> None:
        self._change(roster.cancel_leave(self.roster, ranks), "cancel_leave", ranks)

    async def detach(self, ranks: list[int], idle_epoch: int | None = None) -> Roster:
        if idle_epoch in (None, self.roster.epoch):
            await asyncio.sleep(self.group_s)
            self._change(roster.detach(self.roster, ranks), "detach", ranks)
        return self.roster

    async def remove_failed(self, ranks: list[int], incarnations: list[int] | None = None) -> None:
        self._lost |= set(ranks)
        others = {
            m.rank
            for m in self.roster.members
            if m.incarnation not in (incarnations or [m.incarnation])
        }
        gone = [rank for rank in ranks if rank not in others]
        self._change(roster.remove(self.roster, gone), "remove_failed", ranks)

    async def membership(self) -> Membership:
        return Membership(
            await self.view(),
            list(self.stalled_engines),
            self.kept,
            versions=list(self.needed),
        )

    async def pause(self) -> None:
        self._check_leader()
        self.state = "paused"

    async def resume(self) -> None:
        self._check_leader()
        self.state = "serving"

    def _check_leader(self) -> None:
        if not self.kept.is_led_by(manager := self.manager_id()):
            raise NotLeading(manager.owner)

    async def take_over(self, state: ManagerState) -> None:
        self.save_manager_state(state)

    def save_manager_state(self, state: ManagerState) -> None:
        if self.kept.is_led_by(state.manager_id):
            self.kept = state

    def report_stalled(self, rank: int) -> None:
        """Reports an engine that makes no more progress, as the coordinator does."""
        member = self.roster.find(rank)
        assert member is not None
        stalled = StalledEngine(rank, member.incarnation, f"engine {rank} was silent")
        self.stalled_engines.append(stalled)
        self._change(roster.remove(self.roster, [rank]), "stopped", [rank])

    def restart(self, *ranks: int) -> None:
        """Restarts the coordinator. It knows only the engines `ranks`, from their reports."""
        known = [m for m in self.roster.members if m.rank in ranks]
        epoch = self.roster.epoch
        active = roster.update_members(Roster(0, tuple(known)), ranks, state=MemberState.ACTIVE)
        self.stalled_engines, self.kept, self.state = [], ManagerState(), "serving"
        self._change(Roster(epoch + 1, active.members), "restart", list(ranks))

    def _change(self, after: Roster, event: str, ranks: list[int]) -> None:
        self.roster = after
        self.events.append((event, sorted(ranks)))
        self._changed.set()


@dataclass(eq=False)
class Process:
    """An engine as Ray sees it. It outlives the manager that started it."""

    handle: EngineHandle
    ready_at: float
    ended: asyncio.Future[str]
    version: str
    """The version that it runs or will run next."""
    ready: EngineReady | None = None


class FakeCollector:
    """A fake `OrphanCollector`."""

    left: Leftovers | None = None

    def leftovers(self) -> Leftovers | None:
        return self.left

    async def collect_forever(self) -> None:
        await asyncio.sleep(1e9)


class FakePlacement:
    """A fake `Placement` with scripted engines.

    As in Ray, a process and its placement group are separate: if the process dies, the group stays
    and keeps its name and resources until it is removed.
    """

    def __init__(self, coordinator: FakeCoordinator) -> None:
        self.coordinator = coordinator
        self.orphans = FakeCollector()
        self.processes: dict[str, Process] = {}
        self.groups: set[str] = set()
        self.keys = KEYS
        """The channel keys of the next manager's coordinator."""
        self.capacity = 1000
        """The number of placement groups for which there are resources."""
        self.events = coordinator.events
        self.failures: dict[int, list[StartFailed]] = {}
        """Rank -> the errors that its next starts raise."""
        self.always: StartFailed | None = None
        self.broken: set[str] = set()
        """Versions whose engines never start."""
        self.unreadable: set[str] = set()
        """Versions whose weights engines fail to load in place of their own."""
        self.room = 1000
        self.waits_for_room = False
        """Whether an engine beyond `capacity` waits instead of failing."""
        self.hang_reports = deque[str]()
        self.nodes: dict[int, str] = {}
        """Rank -> the node of its engine. The other engines are on `node`."""
        self.draining: dict[str, float] = {}
        """Node -> seconds until it is taken away."""
        self.hung: set[int] = set()
        """Engines that do not answer any call."""
        self.dies_on_start: set[int] = set()
        """Ranks whose next engines die right after their start."""
        self.slow_s: dict[int, float] = {}
        """Rank -> extra seconds until its engines are ready."""
        self.starting = 0
        self.max_starting = 0
        self._known: set[str] = set()
        self._num_started = 0

    @property
    def alive(self) -> dict[int, EngineHandle]:
        """The engines that can serve, by rank."""
        ready = [process for process in self.processes.values() if process.ready]
        assert len({process.handle.rank for process in ready}) == len(ready), "two of one rank"
        return {process.handle.rank: process.handle for process in ready}

    async def draining_nodes(self) -> dict[str, float]:
        return self.draining

    async def refusal(self, version: Version, engines: int) -> str | None:
        return f"no room for {engines} engines" if engines > self.room else None

    def tag(self, version: Version) -> str:
        return names.engine_tag(version.weights_lineage, self.keys)

    async def adopt(self, versions: Sequence[Version]) -> Adopted:
        listed = self.coordinator.roster
        tags = {self.tag(version) for version in versions}
        by_name = {version.name: version for version in versions}
        found = names.candidates(self.processes, self.groups, "swell", tags)
        found = [name for name in found if name.rank not in self.hung]
        ready = {name: self.processes[str(name)].ready for name in found}
        starts = {name: r.incarnation if r else None for name, r in ready.items()}
        kept = list(names.choose(starts, listed).values())
        self._known = {str(name) for name in kept}
        self._end_orphans()
        serving, newcomers = [], []
        for name in kept:
            process = self.processes[str(name)]
            version = by_name[process.version]
            handle = process.handle = EngineHandle(name.rank, str(name), version, ready=ready[name])
            member = listed.find(name.rank, starts[name]) if ready[name] else None
            if member is not None and member.state is MemberState.LEAVING:
                handle.intent = Intent.LEAVE
            (newcomers if member is None else serving).append(handle)
        gone = set(listed.ranks) - {handle.rank for handle in serving}
        if gone:
            await self.coordinator.remove_failed(sorted(gone))
        return Adopted(serving, newcomers, list(self.coordinator.needed))

    def _end_orphans(self) -> None:
        for name in sorted({*self.processes, *self.groups} - self._known):
            self._note("orphan", [int(name.split("-")[2])])
            self.groups.discard(name)
            process = self.processes.pop(name, None)
            if process is not None:
                process.ended.set_result("it was killed")

    def plan(self, rank: int, version: Version) -> EngineHandle:
        return self._plan(rank, self.tag(version), version)

    def _plan(self, rank: int, tag: str, version: Version | None = None) -> EngineHandle:
        self._num_started += 1
        name = str(EngineName("swell", rank, tag, f"{self._num_started}"))
        self._known.add(name)
        return EngineHandle(rank, name, version)

    async def start(self, handle: EngineHandle, on_waiting: Callable[[], None]) -> None:
        self.starting += 1
        self.max_starting = max(self.max_starting, self.starting)
        try:
            await self._start(handle, on_waiting)
        except (asyncio.CancelledError, WeightsRefused):
            raise
        except BaseException:
            await self.end(handle)
            raise
        finally:
            self.starting -= 1

    async def _start(self, handle: EngineHandle, on_waiting: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        if handle.name not in self.groups:
            self._note("start", [handle.rank])
            self._end_orphans()
            await self._reserve(handle, on_waiting)
            self.place(handle, loop.time() + START_S + self.slow_s.get(handle.rank, 0.0))
        process = self.processes.get(handle.name)
        if process is not None and process.version != handle.version_name:
            await self._reload(handle, process)
        await asyncio.sleep(process.ready_at - loop.time() if process else 0.0)
        if handle.version_name in self.broken:
            raise permanent("its weights do not load")
        failure = self.always or next(iter(self.failures.get(handle.rank, [])), None)
        if failure is not None:
            if not self.always:
                del self.failures[handle.rank][0]
            raise failure
        if process is None or handle.name not in self.processes:
            raise transient("its process ended")
        handle.ready = process.ready = process.ready or self._ready(handle)
        if handle.rank in self.dies_on_start:
            self.dies_on_start.remove(handle.rank)
            self.kill_engine(handle.rank)

    async def _reload(self, handle: EngineHandle, process: Process) -> None:
        own, process.version, process.ready = process.version, handle.version_name, None
        self._note("reload", [handle.rank])
        await asyncio.sleep(RELOAD_S)
        if handle.version_name in self.broken | self.unreadable:
            process.version = own
            process.ready = self._ready(handle, own)
            assert handle.previous is not None and handle.previous.name == own
            raise WeightsRefused("its weights do not load", handle.previous)

    async def _reserve(self, handle: EngineHandle, on_waiting: Callable[[], None]) -> None:
        reason, clock = f"no room for engine {handle.rank}", asyncio.get_running_loop().time
        is_apart, until = handle.is_extra or handle.for_answers, clock() + WAIT_FOR_ROOM_S
        waits = self.waits_for_room or handle.for_answers
        try:
            while len(self.groups) >= self.capacity:
                if not waits or (is_apart and clock() > until):
                    raise NoRoom(reason)
                handle.waits_for_room = reason
                on_waiting()
                await asyncio.sleep(1.0)
        finally:
            if handle.waits_for_room is not None:
                handle.waits_for_room = None
                on_waiting()

    def place(self, handle: EngineHandle, ready_at: float) -> None:
        """Creates the process of an engine, which begins to load."""
        self.groups.add(handle.name)
        ended = asyncio.get_running_loop().create_future()
        version = handle.version_name or FIRST
        self.processes[handle.name] = Process(handle, ready_at, ended, version)

    def add_existing(self, rank: int, tag: str = TAG) -> Member:
        """Adds an engine that an earlier manager left, ready to serve."""
        handle = self._plan(rank, tag)
        self.place(handle, 0.0)
        handle.ready = self.processes[handle.name].ready = self._ready(handle)
        return handle.member

    async def refresh(self, handle: EngineHandle) -> None:
        if handle.rank in self.hung or handle.name not in self.processes:
            raise TimeoutError
        self._note("refresh", [handle.rank])

    async def ended(self, handle: EngineHandle) -> str:
        assert handle.ready is not None, "who has not started cannot be watched"
        process = self.processes.get(handle.name)
        return "it was killed" if process is None else await asyncio.shield(process.ended)

    async def status(self, handle: EngineHandle) -> StartStatus:
        return StartStatus("waiting for resources")

    async def end(self, handle: EngineHandle) -> None:
        self._end(handle, "end")

    async def kill(self, handle: EngineHandle) -> None:
        self._end(handle, "kill")

    def _end(self, handle: EngineHandle, event: str) -> None:
        if handle.exit_watcher is not None and handle.exit_watcher is not asyncio.current_task():
            handle.exit_watcher.cancel()
        self._known.discard(handle.name)
        if handle.name in self.processes or handle.name in self.groups:
            self.groups.discard(handle.name)
            self.processes.pop(handle.name, None)
            self.hung.discard(handle.rank)
            self._note(event, [handle.rank])

    async def close(self, handles: list[EngineHandle]) -> None:
        for handle in handles:
            await self.end(handle)

    def kill_engine(self, rank: int) -> None:
        """Kills the process. The placement group stays."""
        name = self.alive[rank].name
        self.processes.pop(name).ended.set_result("it was killed")

    def ranks_of_event(self, name: str) -> list[list[int]]:
        return [ranks for event, ranks in self.events if event == name]

    def _ready(self, handle: EngineHandle, version: str = "") -> EngineReady:
        self._num_started += 1
        return EngineReady(
            handle.rank,
            ChannelAddress("machine", f"ipc://@{handle.rank}", "tcp://127.0.0.1:1"),
            ExecutorLimits(10, 100, 50),
            pid=1000 + handle.rank,
            node=self.nodes.get(handle.rank, "node"),
            workers=(WorkerInfo(0, 0, 0, 2000 + handle.rank),),
            incarnation=self._num_started,
            version=version or handle.version_name or FIRST,
        )

    def _note(self, event: str, ranks: list[int]) -> None:
        self.events.append((event, sorted(ranks)))


class FakeCheckpointStore:
    """A fake `CheckpointStore`. It outlives all managers, and those of one application share its
    page: the newest state, and the newest claim."""

    def __init__(self, cluster_id: str, page: list[ClusterCheckpoint] | None = None) -> None:
        self.cluster_id = cluster_id
        self.page = [ClusterCheckpoint(), ClusterCheckpoint()] if page is None else page
        self.away = False
        self.hangs = False

    async def _answer(self) -> None:
        await asyncio.sleep(10.0 if self.hangs else CHECKPOINT_S)
        if self.away:
            raise TimeoutError

    async def read(self) -> ClusterCheckpoint:
        await self._answer()
        return self.page[0]

    async def owner(self) -> str:
        await self._answer()
        return self.page[1].desired.owner

    async def write(self, note: ClusterCheckpoint) -> None:
        await asyncio.sleep(CHECKPOINT_S)
        if self.away:
            raise TimeoutError
        if self.page[1].desired.owner == note.desired.owner:
            self.page[0] = note

    async def claim(self, owner: str, known_term: int) -> int:
        await self._answer()
        term = max(known_term, *(each.desired.term for each in self.page)) + 1
        self.page[1] = ClusterCheckpoint(DesiredState(owner, term=term))
        return term

    async def clear(self) -> None:
        await self._answer()
        self.page[:] = ClusterCheckpoint(), ClusterCheckpoint()


class VirtualRuntime(ThreadRuntime):
    """A runtime whose Unix time is that of the event loop."""

    def unix_time(self) -> float:
        return asyncio.get_running_loop().time()


class ManagerHarness:
    """Managers, and the engines and coordinator that they manage, in virtual time."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = load({"model": {"path": "m"}, **config})
        self.coordinator = FakeCoordinator([])
        self.placement = FakePlacement(self.coordinator)
        self.checkpoints = FakeCheckpointStore("configuration")
        self.config_hash = "configuration"
        self.manager = self.another()

    def redeploy(self, cluster_id: str, **parallel: Any) -> None:
        """Gives the next manager another configuration."""
        self.config = load({"model": {"path": "m"}, "parallel": parallel})
        self.checkpoints = FakeCheckpointStore(cluster_id, self.checkpoints.page)
        self.placement.keys = "other keys"
        self.coordinator = FakeCoordinator(self.placement.events)
        self.placement.coordinator = self.coordinator

    def configure(self, **sections: Any) -> None:
        """Changes configuration keys that engines do not read, and creates the next manager."""
        self.config = load({"model": {"path": "m"}, **sections})
        self.manager = self.another()

    def another(self) -> ClusterManager:
        """Creates a manager. From now on, coordinator and placement work for it."""
        runtime = VirtualRuntime()
        writer = CheckpointWriter(self.checkpoints, self.config, runtime)
        self.coordinator.manager_id = writer.manager_id
        self.placement.may_end = writer.confirm_leader
        return ClusterManager(
            self.config, self.coordinator, self.placement, writer, runtime, self.config_hash
        )

    async def upgrade(self, config_hash: str) -> None:
        await self.manager.upgrade(config_hash, self.config)

    async def update_weights(self, folder: str) -> None:
        """Updates the weights to those in `folder`."""
        model = msgspec.structs.replace(self.config.model, path=folder)
        config = msgspec.structs.replace(self.config, model=model)
        await self.manager.upgrade(folder, config, in_place=True)

    @property
    def versions(self) -> list[str]:
        """The versions of the active engines, sorted."""
        return sorted(m.version for m in self.coordinator.roster.members if m.rank in self.active)

    async def lose_manager(self) -> None:
        """Stops the manager without cleanup, and creates its successor without starting it."""
        await self.manager.leave()
        self.manager = self.another()

    async def settle(self) -> None:
        """Waits until nothing changes any more. Fails after a time limit."""
        quiet = 0
        for _ in range(10_000):
            await asyncio.sleep(0.05)
            is_quiet = self.manager.phase in ("idle", "failed")
            stage = self.manager.upgrader.record.stage
            is_quiet &= stage in (UpgradeStage.SETTLED, UpgradeStage.FAILED)
            quiet = quiet + 1 if is_quiet else 0
            if quiet == 40:
                return
        raise AssertionError(f"still in phase {self.manager.phase!r}")

    async def start(self) -> None:
        await self.manager.start()
        await self.settle()

    @property
    def active(self) -> list[int]:
        """The ranks to which clients send requests. Checks that each has a live engine."""
        ranks = [m.rank for m in self.coordinator.roster.members if m.state is MemberState.ACTIVE]
        assert set(ranks) <= set(self.placement.alive)
        return ranks


Scenario = Callable[[ManagerHarness], Awaitable[None]]


def run(scenario: Scenario, *, data: int = 1, **cluster: Any) -> ManagerHarness:
    """Runs a scenario, stops the manager, and checks that nothing is left."""
    loop = VirtualTimeLoop()
    harness = ManagerHarness({"parallel": {"data": data}, "cluster": cluster})

    async def whole() -> None:
        await scenario(harness)
        await harness.manager.stop()
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, "tasks were left"
        assert not harness.placement.processes, "engines were left"
        assert not harness.placement.groups, "placement groups were left"

    try:
        loop.run_until_complete(whole())
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
    return harness


def transient(text: str = "no room") -> StartFailed:
    return StartFailed(text, permanent=False)


def permanent(text: str = "no such model") -> StartFailed:
    return StartFailed(text, permanent=True)


def busy(rank: int) -> EngineReport:
    return EngineReport(rank, running=1)
