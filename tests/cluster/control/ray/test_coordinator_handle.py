"""Detection of a coordinator that does not answer. Ray is a fake, and time is virtual."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from swell.cluster.control.engines.engine_handle import EngineHandle
from swell.cluster.control.engines.fleet import Fleet
from swell.cluster.control.engines.placement import Placement
from swell.cluster.control.plan.fleet_view import Intent
from swell.cluster.control.ray.actor_errors import ActorDied
from swell.cluster.control.ray.coordinator_handle import CoordinatorHandle
from swell.configs.schema import load
from swell.coordinator.manager_state import ManagerId
from swell.coordinator.roster import Member, MemberState, Roster
from swell.coordinator.state_machine import JoinResult
from swell.coordinator.transport.channel import ChannelAddress
from swell.coordinator.transport.runtime import ThreadRuntime
from swell.coordinator.wire import ClusterView
from tests.cluster.control.engines.test_placement import ready_answer
from tests.cluster.control.fake_manager import FakeCheckpointStore, VirtualTimeLoop
from tests.cluster.control.ray.fake_ray import FakeRay


class StoppedActor(FakeRay):
    """An actor that answers no call until it has been killed `kills` times, and then answers all of
    them."""

    def __init__(self, kills: int) -> None:
        super().__init__()
        self.kills_left = kills
        self.lives = asyncio.Event()

    async def _answer(self, _actor: str, method: str, _args: tuple[Any, ...]) -> ClusterView:
        assert method in ("view", "probe")
        await self.lives.wait()
        return ClusterView(Roster())

    async def kill(self, _actor: str, *, restart: bool = False) -> None:
        assert restart
        self.kills_left -= 1
        if self.kills_left == 0:
            self.lives.set()


def test_a_coordinator_whose_successor_is_stopped_too_is_killed_again() -> None:
    async def scenario() -> None:
        actor = StoppedActor(kills=3)
        config, checkpoints = load({"model": {"path": "m"}}), FakeCheckpointStore("c")
        handle = CoordinatorHandle(config, "swell", checkpoints, actor, ManagerId)
        handle._actor = "coordinator"
        async with asyncio.timeout(1000):
            await handle.view()
        assert actor.kills_left == 0

    loop = VirtualTimeLoop()
    try:
        loop.run_until_complete(scenario())
    finally:
        loop.close()


class SlowActor(FakeRay):
    """An actor that was suspended. Each successor needs `start_s` before it answers pending
    calls."""

    def __init__(self, start_s: float) -> None:
        super().__init__()
        self._start_s = start_s
        self.kills = 0
        self._life = asyncio.Event()

    async def _answer(self, _actor: str, _method: str, _args: tuple[Any, ...]) -> ClusterView:
        """Repeats the call on the successor if the actor dies, as Ray does."""
        if self.kills == 0:
            await self._life.wait()
        while not await self._answers():
            """The call is repeated on the next one."""
        return ClusterView(Roster())

    async def _answers(self) -> bool:
        """Returns whether this incarnation lives until it can answer."""
        life = self._life
        ready_s = max(0.0, self._ready_at - asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(ready_s):
                await life.wait()
            return False
        except TimeoutError:
            return True

    async def kill(self, _actor: str, *, restart: bool = False) -> None:
        assert restart
        self.kills += 1
        self._ready_at = asyncio.get_running_loop().time() + self._start_s
        self._life.set()
        self._life = asyncio.Event()


@pytest.mark.parametrize("callers", [1, 5])
@pytest.mark.parametrize("start_s", [0.0, 2.0, 11.0, 40.0, 150.0, 290.0])
def test_a_slow_successor_is_not_killed_forever(start_s: float, callers: int) -> None:
    """A successor that starts within `start_timeout_s` answers all callers, however many wait for
    it."""

    async def scenario() -> None:
        config, checkpoints = load({"model": {"path": "m"}}), FakeCheckpointStore("c")
        limits = config.cluster
        assert start_s < limits.start_timeout_s
        actor = SlowActor(start_s)
        handle = CoordinatorHandle(config, "swell", checkpoints, actor, ManagerId)
        handle._actor = "coordinator"

        async def call(index: int) -> None:
            await asyncio.sleep(index * limits.stall_timeout_s / 3)
            await handle.view()

        async with asyncio.timeout(10 * limits.start_timeout_s):
            await asyncio.gather(*map(call, range(callers)))
        doublings = max(0.0, math.log2(max(start_s, 1.0) / limits.stall_timeout_s))
        assert 1 <= actor.kills <= 2 + doublings

    loop = VirtualTimeLoop()
    try:
        loop.run_until_complete(scenario())
    finally:
        loop.close()


def test_a_coordinator_that_hangs_after_a_recovery_is_killed_as_early_as_the_first() -> None:
    """A recovered coordinator no longer counts as a starting successor, so each hang is ended by
    one kill."""

    async def scenario() -> None:
        config, checkpoints = load({"model": {"path": "m"}}), FakeCheckpointStore("c")
        loop, taken = asyncio.get_running_loop(), []
        actor = SlowActor(2.0)
        handle = CoordinatorHandle(config, "swell", checkpoints, actor, ManagerId)
        handle._actor = "coordinator"
        for pause_s in (3600.0, 3600.0, 3600.0, 10.0, 10.0):
            await asyncio.sleep(pause_s)
            actor.kills = 0  # suspended again
            begun = loop.time()
            await handle.view()
            taken.append(loop.time() - begun)
            assert actor.kills == 1
        assert max(taken) < 1.1 * min(taken)

    loop = VirtualTimeLoop()
    try:
        loop.run_until_complete(scenario())
    finally:
        loop.close()


def test_a_manager_without_a_connection_to_ray_kills_no_coordinator() -> None:
    """The manager may be cut off, and Ray would carry out the kill later."""

    async def scenario() -> None:
        actor = StoppedActor(kills=1)
        config, checkpoints = load({"model": {"path": "m"}}), FakeCheckpointStore("c")
        checkpoints.away = True
        handle = CoordinatorHandle(config, "swell", checkpoints, actor, ManagerId)
        handle._actor = "coordinator"
        waiting = asyncio.create_task(handle.view())
        await asyncio.sleep(10 * config.cluster.stall_timeout_s)
        assert actor.kills_left == 1
        checkpoints.away = False
        async with asyncio.timeout(1000):
            await waiting
        assert actor.kills_left == 0

    loop = VirtualTimeLoop()
    try:
        loop.run_until_complete(scenario())
    finally:
        loop.close()


async def leads() -> bool:
    """Lets this manager terminate engines."""
    return True


class LostActor(FakeRay):
    """An actor whose host is lost. The actor that `open` finds later answers."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []
        self.earlier: list[int] | None = None
        self.joined: list[Member] = []

    async def _answer(self, actor: str, method: str, args: tuple[Any, ...]) -> Any:
        if method == "view":
            self.called.append(actor)
        if actor == "lost":
            raise ActorDied("its node is gone")
        if method == "view":
            listed = Member(1, ChannelAddress("m", "i", "t"), incarnation=31)
            return ClusterView(Roster(6, (listed,)))
        assert method == "join"
        self.joined, self.earlier = args[0], args[-1]
        return JoinResult(Roster(7), {})


def test_engines_join_the_successor_of_a_coordinator_whose_host_is_lost() -> None:
    async def scenario() -> None:
        ray = LostActor()
        config, checkpoints = load({"model": {"path": "m"}}), FakeCheckpointStore("c")
        handle = CoordinatorHandle(config, "swell", checkpoints, ray, ManagerId)
        handle._actor = "lost"
        new = Member(1, ChannelAddress("m", "i", "t"), incarnation=32)
        joining = asyncio.create_task(handle.join(lambda: [new], [30, 32], dict))
        await asyncio.sleep(10.0)
        handle._actor = "found"
        assert await joining == {}
        assert ray.called[-1] == "found" and 3 < len(ray.called) < 8
        assert ray.earlier == [30, 31]

        handle._actor = "lost"
        with pytest.raises(ActorDied):
            await handle.join(lambda: [new], [], dict)

    loop = VirtualTimeLoop()
    try:
        loop.run_until_complete(scenario())
    finally:
        loop.close()


def test_an_engine_that_begins_to_leave_joins_a_successor_as_leaving() -> None:
    """The coordinator is lost before it answers, and its successor does not know that the engine
    should leave."""

    async def scenario() -> None:
        ray = LostActor()
        config, checkpoints = load({"model": {"path": "m"}}), FakeCheckpointStore("c")
        coordinator = CoordinatorHandle(config, "swell", checkpoints, ray, ManagerId)
        fleet = Fleet(
            config.cluster,
            coordinator,
            Placement(config, "swell", coordinator, ray, ThreadRuntime(), leads),
            ThreadRuntime(),
            lambda *_: None,
            on_change=lambda: None,
        )
        coordinator._actor = "lost"
        handle = EngineHandle(1, "engine", ready=ready_answer(1, 32))
        joining = asyncio.create_task(fleet.join([handle]))
        await asyncio.sleep(10.0)
        handle.intent = Intent.LEAVE
        coordinator._actor = "found"
        assert await joining == {}
        (member,) = ray.joined
        assert member.rank == 1 and member.state is MemberState.LEAVING

    loop = VirtualTimeLoop()
    try:
        loop.run_until_complete(scenario())
    finally:
        loop.close()


def test_an_engine_that_dies_before_its_join_is_sent_does_not_join() -> None:
    """The manager notices its death while the coordinator says which engines it lists."""

    async def scenario() -> None:
        ray, dead = LostActor(), dict[int, str]()
        config, checkpoints = load({"model": {"path": "m"}}), FakeCheckpointStore("c")
        handle = CoordinatorHandle(config, "swell", checkpoints, ray, ManagerId)
        handle._actor = "found"
        new = Member(1, ChannelAddress("m", "i", "t"), incarnation=32)
        joining = asyncio.create_task(handle.join(lambda: [new], [], lambda: dead))
        await asyncio.sleep(0.0)
        dead[1] = "it died"
        assert await joining == {1: "it died"}
        assert ray.called and ray.earlier is None, "no join was sent"

    asyncio.run(scenario())


class LateActor(FakeRay):
    """An actor that never answers a call, and answers a probe when the test wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.probe: asyncio.Future[bool] | None = None

    async def _answer(self, _actor: str, method: str, _args: tuple[Any, ...]) -> Any:
        if method == "probe":
            self.probe = asyncio.get_running_loop().create_future()
            return await self.probe
        await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("turns", range(6))
def test_a_calling_task_ends_if_it_is_cancelled_while_the_probe_is_answered(turns: int) -> None:
    """The task is cancelled `turns` loop iterations after the answer to the probe."""

    async def scenario() -> None:
        actor = LateActor()
        config, checkpoints = load({"model": {"path": "m"}}), FakeCheckpointStore("c")
        handle = CoordinatorHandle(config, "swell", checkpoints, actor, ManagerId)
        handle._actor = "coordinator"
        calling = asyncio.create_task(handle.view())
        while actor.probe is None:
            await asyncio.sleep(0.1)
        actor.probe.set_result(True)
        for _ in range(turns):
            await asyncio.sleep(0)
        calling.cancel()
        done, _ = await asyncio.wait({calling}, timeout=3600)
        assert done and calling.cancelled()

    loop = VirtualTimeLoop()
    try:
        loop.run_until_complete(scenario())
    finally:
        loop.close()
