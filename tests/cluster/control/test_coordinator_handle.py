"""How a coordinator that says nothing is noticed. Ray is a fake here, and time only jumps."""

from __future__ import annotations

import asyncio
from typing import Any

from swell.cluster.control.coordinator_handle import CoordinatorHandle
from swell.configs.schema import load
from swell.coordinator.roster import Roster
from swell.coordinator.wire import ClusterView
from tests.cluster.control.fake_manager import FakeCheckpointStore, VirtualTimeLoop
from tests.cluster.control.fake_ray import FakeRay


class StoppedActor(FakeRay):
    """The actor answers no call until it was killed so often; then it answers all of them."""

    def __init__(self, kills: int) -> None:
        super().__init__()
        self.kills_left = kills
        self.lives = asyncio.Event()

    async def _answer(self, _actor: str, method: str, _args: tuple[Any, ...]) -> ClusterView:
        assert method == "view"
        await self.lives.wait()
        return ClusterView(Roster())

    def kill(self, _actor: str, *, restart: bool = False) -> None:
        assert restart
        self.kills_left -= 1
        if self.kills_left == 0:
            self.lives.set()


def test_a_coordinator_whose_successor_is_stopped_too_is_killed_again() -> None:
    async def scenario() -> None:
        actor = StoppedActor(kills=3)
        config, checkpoints = load({"model": {"path": "m"}}), FakeCheckpointStore("c")
        handle = CoordinatorHandle(config, "swell", checkpoints, actor)
        handle._actor = "coordinator"
        async with asyncio.timeout(1000):
            await handle.view()
        assert actor.kills_left == 0

    loop = VirtualTimeLoop()
    try:
        loop.run_until_complete(scenario())
    finally:
        loop.close()
