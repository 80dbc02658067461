"""A change that a manager has accepted is not lost, for any order of its calls and those of another
manager that takes over, which may terminate after any of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import combinations_with_replacement

from swell.cluster.control.plan.versions import UpgradeRecord
from swell.cluster.control.ray.checkpoint_store import CheckpointStore
from swell.cluster.control.ray.checkpoint_writer import CheckpointWriter
from swell.configs.schema import load
from swell.coordinator.manager_state import DesiredState
from swell.coordinator.transport.runtime import ThreadRuntime
from tests.cluster.control.ray.fake_ray import FakeRay

CONFIG = load({"model": {"path": "m"}, "parallel": {"data": 2}})
BEFORE, AFTER = 2, 3
"""The targets before and after the change."""
CHANGE_TURNS = (2, 1, 2)
"""The calls of a change: who leads, the write, and who leads."""
TAKE_OVER_CALLS = 11
"""The number of calls of the store that an undisturbed take-over makes."""


class TurnRay(FakeRay):
    """The key-value store of one process: each call waits for its turn."""

    def __init__(self, kv: dict[bytes, bytes], *, waits: bool = True) -> None:
        super().__init__()
        self.kv = kv
        self._turns, self._waits = asyncio.Semaphore(0), waits

    async def give_turn(self) -> None:
        self._turns.release()
        for _ in range(8):  # the call, and what follows until the next one
            await asyncio.sleep(0)

    async def _turn(self) -> None:
        if self._waits:
            await self._turns.acquire()

    async def kv_get(self, key: bytes) -> bytes | None:
        await self._turn()
        return await super().kv_get(key)

    async def kv_put(self, key: bytes, value: bytes, *, overwrite: bool = True) -> bool:
        await self._turn()
        return await super().kv_put(key, value, overwrite=overwrite)

    async def kv_keys(self, prefix: bytes) -> list[bytes]:
        await self._turn()
        return await super().kv_keys(prefix)

    async def kv_delete(self, prefix: bytes) -> None:
        await self._turn()
        for key in [key for key in self.kv if key.startswith(prefix)]:
            del self.kv[key]


def writer(ray: FakeRay) -> CheckpointWriter:
    return CheckpointWriter(CheckpointStore("app", "cluster", ray), CONFIG, ThreadRuntime())


async def save(manager: CheckpointWriter, target: int) -> bool:
    desired = DesiredState(target=target, served=True)
    return await manager.save(manager.make(desired, UpgradeRecord(), ()))


async def take_over(manager: CheckpointWriter) -> int:
    """Continues with the target that the previous manager has left, and returns it."""
    await manager.claim()
    target = (await manager.take_over(DesiredState())).desired.target
    await save(manager, target)
    return target


def orders() -> Iterator[str]:
    """Yields orders in which a change (c) and a take-over (t) make their calls. The successor
    terminates after its last one."""
    for calls in range(TAKE_OVER_CALLS + 1):
        for places in combinations_with_replacement(range(calls + 1), len(CHANGE_TURNS)):
            turns = [""] * (calls + 1)
            for place, number in zip(places, CHANGE_TURNS, strict=True):
                turns[place] += "c" * number
            yield "t".join(turns)


async def change_and_take_over(order: str) -> tuple[bool, int]:
    """Returns whether the change was accepted, and the target that the next manager finds."""
    kv: dict[bytes, bytes] = {}
    ray = TurnRay(kv, waits=False)
    first = writer(ray)
    await take_over(first)
    await save(first, BEFORE)
    ray._waits = True
    other = TurnRay(kv)
    rays = {"c": ray, "t": other}
    change = asyncio.create_task(save(first, AFTER))
    successor = asyncio.create_task(take_over(writer(other)))
    for whose in order:
        await rays[whose].give_turn()
    successor.cancel()
    while not change.done():
        await ray.give_turn()
    return change.result(), await take_over(writer(TurnRay(kv, waits=False)))


def test_an_accepted_change_is_found_by_every_later_manager() -> None:
    async def try_all() -> tuple[list[str], int]:
        results = [(order, *await change_and_take_over(order)) for order in orders()]
        lost = [order for order, accepted, found in results if accepted and found != AFTER]
        return lost, sum(accepted for _, accepted, _ in results)

    lost, num_accepted = asyncio.run(try_all())
    assert not lost
    assert num_accepted, "a change is accepted unless another manager takes over before"


def test_the_orders_contain_every_call_of_a_take_over() -> None:
    async def calls_made() -> int:
        kv: dict[bytes, bytes] = {}
        await take_over(writer(TurnRay(kv, waits=False)))
        other, calls = TurnRay(kv), 0
        successor = asyncio.create_task(take_over(writer(other)))
        while not successor.done():
            await other.give_turn()
            calls += 1
        return calls

    assert asyncio.run(calls_made()) == TAKE_OVER_CALLS
