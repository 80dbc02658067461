"""Concurrent tasks: a set that is cancelled with its owner, and jobs that are returned in batches.
Then a hanging job does not delay the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from swell.configs.runtime.log import StructuredLogger

K = TypeVar("K")

_AS_LONG_AGAIN = 1.0
"""How long finished jobs wait for others, in units of the time that the first one took."""

Batch = dict[K, BaseException | None]
"""Finished jobs in the order of `jobs`: None, or the exception."""


class TaskSet:
    """Tasks of one owner, in one event loop. `on_failure` is called after a task has raised; the
    exception is logged."""

    def __init__(self, log: StructuredLogger, on_failure: Callable[[], None]) -> None:
        self._log, self._on_failure = log, on_failure
        self._tasks: dict[asyncio.Task[None], None] = {}
        """The tasks in order of creation."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work` as a concurrent task."""
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._on_end)
        return task

    def _on_end(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._log.error("failed", error=f"{type(error).__name__}: {error}")
            self._on_failure()

    async def cancel(self) -> None:
        """Cancels all tasks except the caller, in order of creation, and waits for them."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _works(key: object) -> bool:
    return False


async def in_batches(
    jobs: Mapping[K, Coroutine[Any, Any, None]], is_idle: Callable[[K], bool] = _works
) -> AsyncGenerator[Batch[K], None]:
    """Runs the jobs concurrently and yields them in batches. After the first success a batch stays
    open for as long again as that job took, but it does not wait for idle jobs: those wait for
    something else, perhaps forever. A failure does not shorten that wait. Closing the iterator
    cancels the remaining jobs."""
    clock = asyncio.get_running_loop().time
    tasks = {asyncio.create_task(job): key for key, job in jobs.items()}
    pending, begun = set(tasks), clock()
    batch: Batch[K] = {}
    due: float | None = None
    try:
        while pending:
            left_s = None if due is None else max(0.0, due - clock())
            done, pending = await asyncio.wait(
                pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )
            batch |= {tasks[task]: _raised(task) for task in tasks if task in done}
            if due is None and None in batch.values():
                due = clock() + _AS_LONG_AGAIN * (clock() - begun)
            is_over = due is not None and clock() >= due
            has_ready = None in batch.values()
            if is_over or not pending or (has_ready and all(is_idle(tasks[t]) for t in pending)):
                ended, batch, due = batch, {}, None
                yield {key: ended[key] for key in tasks.values() if key in ended}
    finally:
        for task in pending:
            task.cancel()


def _raised(task: asyncio.Task[None]) -> BaseException | None:
    return asyncio.CancelledError() if task.cancelled() else task.exception()
