"""Concurrent tasks of one owner: a failure is reported, and a task that ends leaves nothing."""

from __future__ import annotations

import asyncio
import gc
import warnings

from swell.cluster.control.engines.concurrent_tasks import TaskSet
from swell.configs.runtime.log import StructuredLogger
from tests.simulator.kernel.kernel import Kernel
from tests.simulator.kernel.process import Process

LOG = StructuredLogger("test")


async def _work() -> None:
    await asyncio.sleep(1.0)


async def _fail() -> None:
    raise ValueError("it fails")


def test_a_failure_is_reported_and_a_cancelled_task_is_not() -> None:
    failures: list[str] = []

    async def run() -> None:
        tasks = TaskSet(LOG, lambda: failures.append("failed"))
        failing, cancelled = tasks.spawn(_fail()), tasks.spawn(_work())
        await asyncio.wait([failing])
        await tasks.cancel()
        assert cancelled.cancelled() and not tasks._tasks

    asyncio.run(run())
    assert failures == ["failed"]


def _end_before_work_begins() -> None:
    kernel = Kernel(0)
    process = Process(kernel, "p")

    def spawn_and_end() -> None:
        TaskSet(LOG, lambda: None).spawn(_work())
        process.kill()

    kernel.soon(process, spawn_and_end)
    kernel.run(1.0)
    process.close()


def test_work_of_a_process_that_ends_before_it_begins_is_closed() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        _end_before_work_begins()
        gc.collect()
    assert [str(each.message) for each in found] == []
