"""After any events in any order, the number of serving engines equals the accepted target."""

from __future__ import annotations

import asyncio
import random

import pytest

from swell.cluster.control.plan.control_state import ScaleRefused
from tests.cluster.control.fake_manager import START_S, ManagerHarness, busy, run, transient

_LONG_S = 2000.0
"""Longer than the longest wait between two attempts."""


class RandomChanges:
    """Chooses the next event at random, and records the last accepted target."""

    def __init__(self, harness: ManagerHarness, seed: int) -> None:
        self.harness = harness
        self.rng = random.Random(seed)
        self.target = harness.config.parallel.data
        self.pause_requested = False
        self.done: list[str] = []

    async def step(self) -> None:
        kinds = [self.scale, self.drain, self.pause, self.die, self.stop, self.hang, self.fail]
        kinds += [self.restart, self.lose, self.lose_all, self.work, self.rest, self.group]
        kind = self.rng.choice(kinds)
        self.done.append(kind.__name__)
        await kind()
        await asyncio.sleep(self.rng.choice([0.0, 0.005, 0.02, 0.3, 1.0, START_S, 40.0]))

    async def scale(self) -> None:
        target = self.rng.randint(1, 5)
        await self.harness.manager.scale(target, self.rng.choice([None, 0.0, 5.0, 1000.0]))
        await self.accepted()

    async def drain(self) -> None:
        try:
            self.harness.manager.drain(self.rng.randint(0, 4))
        except ScaleRefused:
            return
        await self.accepted()

    async def accepted(self) -> None:
        await self.harness.manager.save()
        self.target = self.harness.manager.target

    async def pause(self) -> None:
        self.pause_requested = not self.pause_requested
        await (
            self.harness.manager.pause() if self.pause_requested else self.harness.manager.resume()
        )
        await self.harness.manager.save()

    async def die(self) -> None:
        for rank in self.some():
            self.harness.placement.kill_engine(rank)

    async def stop(self) -> None:
        for rank in self.some():
            self.harness.placement.hung.add(rank)
            self.harness.coordinator.report_stalled(rank)

    async def hang(self) -> None:
        self.harness.placement.hung |= set(self.some())

    async def fail(self) -> None:
        self.harness.placement.failures[self.rng.randint(0, 4)] = [transient()]

    async def restart(self) -> None:
        self.harness.coordinator.restart(*self.some())

    async def lose(self) -> None:
        await self.harness.lose_manager()
        await asyncio.sleep(self.rng.choice([0.0, 1.0, START_S]))
        await self.harness.manager.start()

    async def lose_all(self) -> None:
        await self.harness.lose_manager()
        await self.die()
        await self.restart()
        await self.harness.manager.start()

    async def work(self) -> None:
        self.harness.coordinator.reports = {rank: busy(rank) for rank in self.some()}

    async def rest(self) -> None:
        self.harness.coordinator.reports.clear()

    async def group(self) -> None:
        self.harness.coordinator.group_s = self.rng.choice([0.0, 10.0])

    def some(self) -> list[int]:
        ranks = sorted(self.harness.placement.alive)
        return self.rng.sample(ranks, self.rng.randint(0, len(ranks)))


@pytest.mark.parametrize("seed", range(20))
def test_every_accepted_target_is_reached(seed, caplog) -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        changes = RandomChanges(harness, seed)
        for _ in range(25):
            await changes.step()
        harness.coordinator.reports.clear()
        harness.placement.failures.clear()
        harness.placement.hung.clear()
        await asyncio.sleep(_LONG_S)
        manager, placement = harness.manager, harness.placement
        assert manager.pause_requested == changes.pause_requested, changes.done
        assert (harness.coordinator.state == "paused") == changes.pause_requested, changes.done
        assert len(harness.active) == manager.target, changes.done
        assert set(placement.processes) == placement.groups, changes.done
        assert len(placement.processes) == manager.target, changes.done
        note = (await harness.checkpoints.read()).desired
        assert (note.target, note.pause_requested) == (manager.target, changes.pause_requested)
        if "change failed" not in caplog.text:  # else the change was given up and logged
            assert (manager.phase, manager.target) == ("idle", changes.target), changes.done

    run(scenario, data=2, max_engines=6, drain_timeout_s=30)
