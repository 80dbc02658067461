"""Concurrent tasks that are cancelled with their owner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from swell.configs.runtime.log import StructuredLogger


class TaskSet:
    """Tasks of one owner, in one event loop. `on_failure` is called after a task has raised; the
    exception is logged."""

    def __init__(self, log: StructuredLogger, on_failure: Callable[[], None]) -> None:
        self._log, self._on_failure = log, on_failure
        self._tasks: dict[asyncio.Task[None], None] = {}
        """The tasks in order of creation."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` as a concurrent task."""

        async def run() -> None:
            try:
                await work
            except Exception as error:
                self._log.error("failed", error=f"{type(error).__name__}: {error}")
                self._on_failure()

        task = asyncio.create_task(run())
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        task.add_done_callback(lambda _task: work.close())  # cancelled before it started
        return task

    async def cancel(self) -> None:
        """Cancel all tasks except the caller, in order of creation, and wait for them."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
