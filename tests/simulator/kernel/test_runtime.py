"""The simulated runtime, with tests of its waits that also run with the real runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from swell.coordinator.transport.channel import make_keys
from swell.coordinator.transport.runtime import Runtime, ThreadRuntime, drive
from swell.worker.wire import GroupPlan, Regrouped
from tests.simulator.kernel.kernel import Kernel
from tests.simulator.kernel.process import Process
from tests.simulator.kernel.runtime import SimRuntime
from tests.simulator.model import SimExecutor
from tests.simulator.network.network import Network

KEYS = make_keys()
SOON_S = 60.0
WAIT_S, RESOLUTION_S = 0.1, 0.001
"""ZeroMQ counts whole milliseconds of its clock, so a wait may return this much early."""

Work = Callable[[Runtime], Coroutine[Any, Any, None]]


def on_threads(work: Work) -> None:
    drive(work(ThreadRuntime()))


def simulated(work: Work, seed: int = 0) -> Kernel:
    kernel = Kernel(seed)
    process = Process(kernel, "p")
    runtime = SimRuntime(process, Network(kernel))
    tasks: list[asyncio.Task[None]] = []
    kernel.soon(process, lambda: tasks.append(process.loop.create_task(work(runtime))))
    kernel.run(100.0)
    tasks[0].result()
    assert kernel.failures == []
    return kernel


both = pytest.mark.parametrize(
    "run", [pytest.param(on_threads, marks=pytest.mark.slow, id="threads"), simulated]
)


@both
def test_a_wait_ends_with_a_message_a_timeout_or_a_wake_up(run: Callable[[Work], None]) -> None:
    async def work(runtime: Runtime) -> None:
        inbox, waker = runtime.inbox(str, KEYS), runtime.waker()
        outlet = runtime.outlet(inbox.address, str, KEYS)
        assert not await runtime.ready(inbox, 0.0)
        begun = runtime.now()
        assert not await runtime.ready(inbox, WAIT_S)
        assert WAIT_S - RESOLUTION_S <= runtime.now() - begun < SOON_S
        outlet.send("x")
        assert await runtime.ready(inbox, SOON_S, waker)
        ((peer, message),) = inbox.take()
        assert message == "x"
        inbox.send(peer, "y")
        assert await runtime.ready(outlet, SOON_S)
        assert outlet.take() == "y"
        waker.wake()  # before the wait
        waker.wake()
        assert not await runtime.ready(inbox, None, waker)
        begun = runtime.now()
        assert not await runtime.ready(inbox, WAIT_S, waker)  # it was woken only once
        assert runtime.now() - begun >= WAIT_S - RESOLUTION_S
        waker.wake()
        assert not await runtime.ready(inbox, 0.0, waker)  # no wait: the next call returns at once
        assert not await runtime.ready(inbox, None, waker)
        for end in (outlet, inbox, waker):
            end.close()
        waker.wake()

    run(work)


@both
def test_a_wait_is_ended_from_another_loop(run: Callable[[Work], None]) -> None:
    async def work(runtime: Runtime) -> None:
        inbox, other, waker = runtime.inbox(str, KEYS), runtime.inbox(str, KEYS), runtime.waker()

        async def wake() -> None:
            await runtime.ready(other, 0.05)
            waker.wake()

        begun = runtime.now()
        loop = runtime.spawn("wake", wake())
        assert not await runtime.ready(inbox, SOON_S, waker)
        assert 0.05 <= runtime.now() - begun < SOON_S
        loop.join()
        for end in (inbox, other, waker):
            end.close()

    run(work)


@both
def test_calls_and_steps_run_on_the_simulated_runtime(run: Callable[[Work], None]) -> None:
    class Step:
        def get_output(self) -> int:
            return 7

    async def work(runtime: Runtime) -> None:
        assert await runtime.result(Step()) == 7
        assert await runtime.run(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await runtime.run(divmod, 7, 0)
        assert 0 <= runtime.random_bits(8) < 256
        runtime.flush(0.0)

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

    async def work(runtime: Runtime) -> None:
        begun = runtime.now()
        assert await runtime.result(Step()) == 7
        assert runtime.now() - begun == pytest.approx(2.0)
        assert await runtime.run(form, 4) == 4  # type: ignore[arg-type]
        assert runtime.now() - begun == pytest.approx(5.0)

    simulated(work)


def test_a_loop_answers_a_caller_of_its_process() -> None:
    async def work(runtime: Runtime) -> None:
        inbox = runtime.inbox(str, KEYS)
        future, failed = runtime.future(), runtime.future()

        async def answer() -> None:
            await runtime.ready(inbox, 1.0)
            assert future.set_running_or_notify_cancel()
            future.set_result("done")
            failed.set_exception(KeyError("no"))

        runtime.spawn("answer", answer())
        answered: Any = runtime.answer(future)
        assert await answered == "done"
        with pytest.raises(KeyError):
            await runtime.answer(failed)

    simulated(work)


def test_a_failed_loop_stops_its_process() -> None:
    kernel = Kernel(0)
    process = Process(kernel, "p")
    runtime = SimRuntime(process, Network(kernel))

    async def work() -> None:
        raise ValueError("why")

    kernel.soon(process, lambda: runtime.spawn("loop", work()))
    kernel.run(1.0)
    assert not process.alive and kernel.failures == ["p: loop: ValueError('why')"]


def test_a_loop_that_polls_endlessly_is_found() -> None:
    async def work(runtime: Runtime) -> None:
        inbox = runtime.inbox(str, KEYS)
        while True:
            await runtime.ready(inbox, 0.0)

    with pytest.raises(AssertionError, match="p looks without end"):
        simulated(work)


def test_random_bits_belong_to_the_process() -> None:
    kernel = Kernel(0)
    net = Network(kernel)
    first, second = (SimRuntime(Process(kernel, name), net) for name in ("first", "second"))
    assert first.random_bits(64) != second.random_bits(64)
    again = SimRuntime(Process(Kernel(0), "first"), net)
    again.random_bits(64)
    assert again.random_bits(64) == first.random_bits(64)


def test_simulated_workers_answer_a_regroup_like_real_ones() -> None:
    """The executor returns a list at once, like every executor, and the runtime awaits it."""
    answers: list[list[Regrouped]] = []

    async def work(runtime: Runtime) -> None:
        executor = SimExecutor(runtime.process)  # type: ignore[attr-defined]
        executor.start()
        for level in (0, 1, 0):
            answers.append(executor.regroup(GroupPlan(generation=0, sleep_level=level)))
            assert isinstance(answers[-1], list) and sum(a.freed_bytes for a in answers[-1]) == 0
            assert await runtime.run(lambda: answers[-1]) == []

    simulated(work)
    assert len(answers) == 3
