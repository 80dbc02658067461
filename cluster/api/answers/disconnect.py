"""Stops work for a client when the client disconnects or when its time limit has passed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from swell.cluster.api.request_context import RequestContext
from swell.cluster.client.requests.deadline import RequestTimedOut

T = TypeVar("T")


async def run_until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Returns the result of `work`. Cancels it and raises ClientDisconnect if the client leaves
    first."""
    task: asyncio.Future[T] = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_for_disconnect(receive))
    for future in (task, leaving):
        future.add_done_callback(_forget_error)
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        pending = [future for future in (task, leaving) if not future.done()]
        for future in pending:
            future.cancel()
        if pending:  # not `await` of each: it would take our own cancellation for theirs
            await asyncio.wait(pending)


def _forget_error(task: asyncio.Future[Any]) -> None:
    """Keeps asyncio from logging a failure if the client left, or the time was over, at the same
    moment."""
    if not task.cancelled():
        task.exception()


async def with_deadline(context: RequestContext, work: Awaitable[T]) -> T:
    """Works like `run_until_disconnect`, but also raises RequestTimedOut at the client's
    deadline."""
    deadline = context.deadline
    limit = asyncio.timeout_at(None if deadline is None else deadline.at_s)
    try:
        async with limit:
            return await run_until_disconnect(context.receive, work)
    except TimeoutError:
        if deadline is None or not limit.expired():
            raise
        raise RequestTimedOut(deadline.timeout_s) from None


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
