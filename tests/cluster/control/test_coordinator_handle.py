"""How a coordinator that says nothing is noticed. Ray is a fake here, and time only jumps."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from swell.cluster.control import coordinator_handle
from swell.cluster.control.coordinator_handle import CoordinatorHandle
from swell.configs.schema import load
from swell.coordinator.roster import Roster
from swell.coordinator.wire import ClusterView
from tests.cluster.control.fake_manager import FakeCheckpointStore, VirtualTimeLoop


class StoppedActor:
    """It answers nothing until it was killed so often; what was asked of it is then answered."""

    def __init__(self, kills: int) -> None:
        self.kills_left = kills
        self.lives = asyncio.Event()
        self.view = SimpleNamespace(remote=self._view)

    async def _view(self) -> ClusterView:
        await self.lives.wait()
        return ClusterView(Roster())

    def kill(self, _actor: Any, *, no_restart: bool) -> None:
        assert not no_restart
        self.kills_left -= 1
        if self.kills_left == 0:
            self.lives.set()


def test_a_coordinator_whose_successor_is_stopped_too_is_killed_again(monkeypatch) -> None:
    async def scenario() -> None:
        actor = StoppedActor(kills=3)
        monkeypatch.setattr(coordinator_handle.ray, "kill", actor.kill)
        handle = CoordinatorHandle(
            load({"model": {"path": "m"}}), "swell", FakeCheckpointStore("c")
        )
        handle._actor = actor
        async with asyncio.timeout(1000):
            await handle.view()
        assert actor.kills_left == 0

    loop = VirtualTimeLoop()
    try:
        loop.run_until_complete(scenario())
    finally:
        loop.close()
