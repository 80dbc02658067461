"""Work that is done side by side, taken in batches: one that hangs holds up no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

K = TypeVar("K")

_AS_LONG_AGAIN = 1.0
"""How long what is done waits for more of it, in units of what the first of it took."""

Batch = dict[K, BaseException | None]
"""What was done, in the order of the jobs: None, or what it raised."""


def _works(key: object) -> bool:
    return False


async def in_batches(
    jobs: Mapping[K, Coroutine[Any, Any, None]], is_idle: Callable[[K], bool] = _works
) -> AsyncGenerator[Batch[K], None]:
    """Run the jobs. What has succeeded waits for the others as long again as the first of it took,
    but not for those that are idle then: they wait for something else, perhaps without end. What
    fails never ends that wait. The jobs that are left are cancelled with the iterator."""
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
