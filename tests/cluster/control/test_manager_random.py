"""Whatever happens in whatever order: when it is over, as many engines serve as were accepted."""

from __future__ import annotations

import asyncio
import random

import pytest

from swell.cluster.control.manager import ScaleRefused
from tests.cluster.control.lives import START_S, World, busy, run, transient

_LONG_S = 2000.0
"""Longer than the longest wait between two attempts."""


class Chaos:
    """Draws what happens next; knows what an operator was told last."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.draw = random.Random(seed)
        self.target = world.config.parallel.data
        self.held = False
        self.done: list[str] = []

    async def step(self) -> None:
        kinds = [self.scale, self.drain, self.pause, self.die, self.stop, self.hang, self.fail]
        kinds += [self.restart, self.lose, self.lose_all, self.work, self.rest, self.group]
        kind = self.draw.choice(kinds)
        self.done.append(kind.__name__)
        await kind()
        await asyncio.sleep(self.draw.choice([0.0, 0.005, 0.02, 0.3, 1.0, START_S, 40.0]))

    async def scale(self) -> None:
        target = self.draw.randint(1, 5)
        self.world.manager.scale(target, self.draw.choice([None, 0.0, 5.0, 1000.0]))
        await self.accepted()

    async def drain(self) -> None:
        try:
            self.world.manager.drain(self.draw.randint(0, 4))
        except ScaleRefused:
            return
        await self.accepted()

    async def accepted(self) -> None:
        await self.world.manager.save()
        self.target = self.world.manager.target

    async def pause(self) -> None:
        self.held = not self.held
        await (self.world.manager.pause() if self.held else self.world.manager.resume())
        await self.world.manager.save()

    async def die(self) -> None:
        for rank in self.some():
            self.world.placement.die(rank)

    async def stop(self) -> None:
        for rank in self.some():
            self.world.placement.hung.add(rank)
            self.world.coordinator.find_stopped(rank)

    async def hang(self) -> None:
        self.world.placement.hung |= set(self.some())

    async def fail(self) -> None:
        self.world.placement.failures[self.draw.randint(0, 4)] = [transient()]

    async def restart(self) -> None:
        self.world.coordinator.restart(*self.some())

    async def lose(self) -> None:
        await self.world.lose_manager()
        await asyncio.sleep(self.draw.choice([0.0, 1.0, START_S]))
        await self.world.manager.start()

    async def lose_all(self) -> None:
        await self.world.lose_manager()
        await self.die()
        await self.restart()
        await self.world.manager.start()

    async def work(self) -> None:
        self.world.coordinator.reports = {rank: busy(rank) for rank in self.some()}

    async def rest(self) -> None:
        self.world.coordinator.reports.clear()

    async def group(self) -> None:
        self.world.coordinator.group_s = self.draw.choice([0.0, 10.0])

    def some(self) -> list[int]:
        ranks = sorted(self.world.placement.alive)
        return self.draw.sample(ranks, self.draw.randint(0, len(ranks)))


@pytest.mark.parametrize("seed", range(20))
def test_what_was_accepted_is_there_in_the_end(seed, caplog) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        chaos = Chaos(world, seed)
        for _ in range(25):
            await chaos.step()
        world.coordinator.reports.clear()
        world.placement.failures.clear()
        world.placement.hung.clear()
        await asyncio.sleep(_LONG_S)
        manager, placement = world.manager, world.placement
        assert manager.held == chaos.held, chaos.done
        assert (world.coordinator.state == "paused") == chaos.held, chaos.done
        assert len(world.active) == manager.target, chaos.done
        assert set(placement.processes) == placement.groups, chaos.done
        assert len(placement.processes) == manager.target, chaos.done
        note = await world.notes.read()
        assert (note.target, note.held) == (manager.target, chaos.held)
        if "change failed" not in caplog.text:  # else it was given up, and that was said
            assert (manager.phase, manager.target) == ("idle", chaos.target), chaos.done

    run(scenario, data=2, max_engines=6, drain_timeout_s=30)
