"""Work for a client ends when the client leaves, or when its time limit is over."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from swell.cluster.client.deadline import Deadline, RequestTimedOut

T = TypeVar("T")


async def run_until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client leaves first (ClientDisconnect)."""
    task: asyncio.Future[T] = asyncio.ensure_future(work)
    task.add_done_callback(_forget_error)
    leaving = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for future in (task, leaving):
            if not future.done():
                future.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await future


def _forget_error(task: asyncio.Future[T]) -> None:
    """A failure is not logged if the client left, or the time was over, at the same moment."""
    if not task.cancelled():
        task.exception()


async def with_deadline(request: Request, work: Awaitable[T]) -> T:
    """As `run_until_disconnect`, and no longer than the client waits (RequestTimedOut)."""
    deadline: Deadline | None = getattr(request.state, "deadline", None)
    limit = asyncio.timeout_at(None if deadline is None else deadline.at_s)
    try:
        async with limit:
            return await run_until_disconnect(request.receive, work)
    except TimeoutError:
        if deadline is None or not limit.expired():
            raise
        raise RequestTimedOut(deadline.timeout_s) from None


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
