"""A simulated process runs asyncio code, and can be stopped, killed and slowed down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from swell.configs.runtime import process as process_setup
from tests.simulator.kernel.kernel import Kernel
from tests.simulator.kernel.process import Process, simulated_exits


@pytest.fixture
def kernel() -> Kernel:
    return Kernel(0)


def start(process: Process, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    process.kernel.soon(process, lambda: process.loop.create_task(work()))


def ticking(process: Process, seen: list[float], period_s: float = 1.0) -> None:
    """Records the world's time after each period of the process's own clock."""

    async def tick() -> None:
        while True:
            await asyncio.sleep(period_s)
            seen.append(round(process.kernel.now, 6))

    start(process, tick)


def test_asyncio_runs_in_a_simulated_process(kernel: Kernel) -> None:
    process = Process(kernel, "p")
    begun = process.time()
    seen: list[Any] = []

    async def work() -> None:
        loop = asyncio.get_running_loop()
        assert loop is process.loop  # type: ignore[comparison-overlap]
        lock, event = asyncio.Lock(), asyncio.Event()

        async def hold() -> str:
            async with lock:
                await asyncio.sleep(1.0)
            event.set()
            return "held"

        task = asyncio.create_task(hold())
        await event.wait()
        assert task.result() == "held" or await task
        seen.append(loop.time() - begun)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await asyncio.sleep(10.0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 0.5)
        both = await asyncio.gather(asyncio.sleep(0.3, "a"), asyncio.sleep(0.1, "b"))
        assert list(both) == ["a", "b"]
        slow = asyncio.create_task(asyncio.sleep(5.0))
        done, pending = await asyncio.wait({slow}, timeout=0.2)
        assert not done and pending == {slow}
        slow.cancel()
        assert await asyncio.to_thread(lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)
        seen.append(round(loop.time() - begun, 1))

    start(process, work)
    kernel.run(100.0)
    assert seen == [pytest.approx(1.0), 2.5]
    assert kernel.failures == []


def test_a_stopped_process_queues_its_events(kernel: Kernel) -> None:
    process, other = Process(kernel, "p"), Process(kernel, "other")
    seen: list[float] = []
    others: list[float] = []
    order: list[int] = []
    ticking(process, seen)
    ticking(other, others)
    kernel.run(1.5)
    process.stop()
    for number in range(5):
        kernel.at(2.0 + number / 10, process, order.append, number)
    kernel.run(3.5)
    assert seen == [1.0] and order == [] and others == [1.0, 2.0, 3.0]
    process.resume()
    kernel.at(3.5, process, order.append, 5)
    kernel.run(4.0)
    assert seen == [1.0, 3.5] and order == [0, 1, 2, 3, 4, 5]
    kernel.run(5.0)
    assert seen == [1.0, 3.5, 4.5]


def test_a_resumed_loop_may_run_before_its_queued_events(kernel: Kernel) -> None:
    """Both orders occur; the events keep their order, and so do the turns of the loop."""
    orders = set()
    for name in "abcdefgh":
        process = Process(kernel, name)
        order: list[str] = []

        async def turn(process: Process = process, order: list[str] = order) -> None:
            await process.sleep(0.5)
            order.append("turn")
            await asyncio.sleep(0)
            order.append("second turn")

        process.loop.create_task(turn())
        kernel.run(kernel.now + 0.25)
        process.stop()
        kernel.at(kernel.now, process, order.append, "first")
        kernel.run(kernel.now + 1.0)
        process.resume()
        kernel.at(kernel.now, process, order.append, "last")
        kernel.run(kernel.now + 1.0)
        orders.add(tuple(order))
    events, turns = ("first", "last"), ("turn", "second turn")
    assert orders == {(*events, *turns), (*turns, *events)}


def test_a_killed_process_loses_its_events(kernel: Kernel) -> None:
    process = Process(kernel, "p")
    seen: list[float] = []
    ended: list[Process] = []
    ticking(process, seen)
    process.on_exit.append(ended.append)
    kernel.run(1.5)
    process.stop()
    kernel.run(2.5)
    process.kill()
    process.resume()
    kernel.run(9.0)
    assert seen == [1.0] and ended == [process] and not process.alive
    process.close()
    assert kernel.failures == []


def test_each_event_of_a_slow_process_is_delayed(kernel: Kernel) -> None:
    process = Process(kernel, "p")
    seen: list[tuple[int, float]] = []
    process.slow(0.5)

    def note(number: int) -> None:
        seen.append((number, kernel.now))

    for number in range(4):
        kernel.at(1.0, process, note, number)
    kernel.at(1.6, process, note, 4)
    kernel.run(2.2)
    assert seen == [(0, 1.0), (1, 1.5), (2, 2.0)]
    process.slow(0.0)
    kernel.run(9.0)
    assert seen[3:] == [(3, 2.5), (4, 2.5)]
    kernel.at(10.0, process, note, 5)
    kernel.at(10.0, process, note, 6)
    kernel.run(11.0)
    assert seen[5:] == [(5, 10.0), (6, 10.0)]


def test_an_event_may_be_charged_for_its_time(kernel: Kernel) -> None:
    process = Process(kernel, "p")
    seen: list[float] = []

    def work() -> None:
        seen.append(kernel.now)
        process.charge(0.2)

    kernel.at(1.0, process, work)
    kernel.at(1.1, process, work)
    kernel.at(5.0, process, work)
    kernel.run(9.0)
    assert seen == pytest.approx([1.0, 1.2, 5.0])


def test_clocks_differ_in_offset_and_rate(kernel: Kernel) -> None:
    fast, slow = Process(kernel, "fast", rate=2.0), Process(kernel, "slow", rate=0.5)
    seen: dict[str, list[float]] = {"fast": [], "slow": []}
    for process in (fast, slow):
        ticking(process, seen[process.name])
    assert fast.time() != slow.time()
    kernel.run(4.1)
    assert seen == {"fast": [0.5 * i for i in range(1, 9)], "slow": [2.0, 4.0]}
    before = slow.time()
    slow.set_clock_rate(4.0)
    assert slow.time() == pytest.approx(before)
    kernel.run(4.9)  # the timer set at the old rate fires at its time by the new rate
    assert seen["slow"] == [2.0, 4.0, 4.3375, 4.5875, 4.8375]


def test_a_timer_is_never_early(kernel: Kernel) -> None:
    chance = kernel.random("test")
    for number in range(200):
        process = Process(kernel, f"p{number}", rate=0.5 + chance.random())
        when = process.time() + chance.random()
        seen: list[float] = []
        process.loop.call_at(when, lambda seen=seen, time=process.time: seen.append(time()))
        kernel.run(kernel.now + 3.0)
        assert when <= seen[0] < when + 1e-6


def test_a_simulated_process_exits_like_a_real_one(kernel: Kernel) -> None:
    process = Process(kernel, "p")
    seen: list[str] = []

    def leave() -> None:
        process_setup.exit_process("the loop", ValueError("why"))
        seen.append("went on")

    async def fail() -> None:
        raise KeyError("lost")

    async def work() -> None:
        await process_setup.exit_on_error_async(fail, "a task")
        seen.append("went on")

    second = Process(kernel, "second")
    kernel.soon(process, leave)
    start(second, work)
    with simulated_exits():
        kernel.run(1.0)
    assert seen == [] and not process.alive and not second.alive
    assert kernel.failures == ["p: the loop: ValueError('why')", "second: a task: KeyError('lost')"]


def test_an_event_that_raises_is_a_failure_of_the_run(kernel: Kernel) -> None:
    process = Process(kernel, "p")
    process.loop.call_soon(lambda: 1 / 0)
    kernel.run(1.0)
    assert len(kernel.failures) == 1 and "ZeroDivisionError" in kernel.failures[0]
    assert process.alive  # asyncio reports the exception, and continues
    kernel.soon(process, lambda: 1 / 0)
    kernel.run(2.0)
    assert len(kernel.failures) == 2 and not process.alive


def test_a_process_whose_loop_never_waits_is_terminated(kernel: Kernel) -> None:
    process = Process(kernel, "p")

    async def nothing() -> None: ...

    async def spin() -> None:
        while True:
            process.loop.create_task(nothing())

    start(process, spin)
    kernel.run(1.0)
    process.close()
    assert "never waits" in kernel.failures[0]
