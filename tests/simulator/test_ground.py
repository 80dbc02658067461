"""The simulated ground, and where it waits as the real one does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from swell.coordinator.transport.channel import make_keys
from swell.coordinator.transport.ground import Ground, ThreadGround, drive
from tests.simulator.ground import SimGround
from tests.simulator.kernel import Kernel
from tests.simulator.network import Network
from tests.simulator.process import Process

KEYS = make_keys()
SOON_S = 60.0
WAIT_S, RESOLUTION_S = 0.1, 0.001
"""ZeroMQ counts whole milliseconds of its clock, so a wait may end so much early."""

Work = Callable[[Ground], Coroutine[Any, Any, None]]


def on_threads(work: Work) -> None:
    drive(work(ThreadGround()))


def simulated(work: Work, seed: int = 0) -> Kernel:
    kernel = Kernel(seed)
    process = Process(kernel, "p")
    ground = SimGround(process, Network(kernel))
    tasks: list[asyncio.Task[None]] = []
    kernel.soon(process, lambda: tasks.append(process.loop.create_task(work(ground))))
    kernel.run(100.0)
    tasks[0].result()
    assert kernel.failures == []
    return kernel


both = pytest.mark.parametrize(
    "run", [pytest.param(on_threads, marks=pytest.mark.slow, id="threads"), simulated]
)


@both
def test_a_wait_ends_with_a_message_the_time_or_the_waker(run: Callable[[Work], None]) -> None:
    async def work(ground: Ground) -> None:
        inbox, waker = ground.inbox(str, KEYS), ground.waker()
        outlet = ground.outlet(inbox.address, str, KEYS)
        assert not await ground.ready(inbox, 0.0)
        begun = ground.now()
        assert not await ground.ready(inbox, WAIT_S)
        assert WAIT_S - RESOLUTION_S <= ground.now() - begun < SOON_S
        outlet.send("x")
        assert await ground.ready(inbox, SOON_S, waker)
        ((peer, message),) = inbox.take()
        assert message == "x"
        inbox.send(peer, "y")
        assert await ground.ready(outlet, SOON_S)
        assert outlet.take() == "y"
        waker.wake()  # before the wait
        waker.wake()
        assert not await ground.ready(inbox, None, waker)
        begun = ground.now()
        assert not await ground.ready(inbox, WAIT_S, waker)  # it was woken once
        assert ground.now() - begun >= WAIT_S - RESOLUTION_S
        waker.wake()
        assert not await ground.ready(inbox, 0.0, waker)  # no wait, so the next one ends
        assert not await ground.ready(inbox, None, waker)
        for end in (outlet, inbox, waker):
            end.close()
        waker.wake()

    run(work)


@both
def test_a_wait_is_ended_from_another_loop(run: Callable[[Work], None]) -> None:
    async def work(ground: Ground) -> None:
        inbox, other, waker = ground.inbox(str, KEYS), ground.inbox(str, KEYS), ground.waker()

        async def wake() -> None:
            await ground.ready(other, 0.05)
            waker.wake()

        begun = ground.now()
        loop = ground.spawn("wake", wake())
        assert not await ground.ready(inbox, SOON_S, waker)
        assert 0.05 <= ground.now() - begun < SOON_S
        loop.join()
        for end in (inbox, other, waker):
            end.close()

    run(work)


@both
def test_calls_and_steps(run: Callable[[Work], None]) -> None:
    class Step:
        def get_output(self) -> int:
            return 7

    async def work(ground: Ground) -> None:
        assert await ground.result(Step()) == 7
        assert await ground.run(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await ground.run(divmod, 7, 0)
        assert 0 <= ground.random_bits(8) < 256
        ground.flush(0.0)

    run(work)


def test_steps_and_calls_take_virtual_time() -> None:
    class Step:
        async def computed(self) -> None:
            await asyncio.sleep(2.0)

        def get_output(self) -> int:
            return 7

    async def form(size: int) -> int:
        await asyncio.sleep(3.0)
        return size

    async def work(ground: Ground) -> None:
        begun = ground.now()
        assert await ground.result(Step()) == 7
        assert ground.now() - begun == pytest.approx(2.0)
        assert await ground.run(form, 4) == 4  # type: ignore[arg-type]
        assert ground.now() - begun == pytest.approx(5.0)

    simulated(work)


def test_a_loop_answers_a_caller_of_its_process() -> None:
    async def work(ground: Ground) -> None:
        inbox = ground.inbox(str, KEYS)
        future, failed = ground.future(), ground.future()

        async def answer() -> None:
            await ground.ready(inbox, 1.0)
            assert future.set_running_or_notify_cancel()
            future.set_result("done")
            failed.set_exception(KeyError("no"))

        ground.spawn("answer", answer())
        answered: Any = ground.answer(future)
        assert await answered == "done"
        with pytest.raises(KeyError):
            await ground.answer(failed)

    simulated(work)


def test_a_loop_that_fails_ends_its_process() -> None:
    kernel = Kernel(0)
    process = Process(kernel, "p")
    ground = SimGround(process, Network(kernel))

    async def work() -> None:
        raise ValueError("why")

    kernel.soon(process, lambda: ground.spawn("loop", work()))
    kernel.run(1.0)
    assert not process.alive and kernel.failures == ["p: loop: ValueError('why')"]


def test_a_loop_that_looks_without_end_is_found() -> None:
    async def work(ground: Ground) -> None:
        inbox = ground.inbox(str, KEYS)
        while True:
            await ground.ready(inbox, 0.0)

    with pytest.raises(AssertionError, match="p looks without end"):
        simulated(work)


def test_random_bits_belong_to_the_process() -> None:
    kernel = Kernel(0)
    net = Network(kernel)
    first, second = (SimGround(Process(kernel, name), net) for name in ("first", "second"))
    assert first.random_bits(64) != second.random_bits(64)
    again = SimGround(Process(Kernel(0), "first"), net)
    again.random_bits(64)
    assert again.random_bits(64) == first.random_bits(64)
