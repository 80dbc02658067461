"""Work that is cancelled at the deadline of its client."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from swell.cluster.api.answers.disconnect import with_deadline
from swell.cluster.api.request_context import RequestContext
from swell.cluster.client.requests.deadline import Deadline, RequestTimedOut


async def _receive() -> dict[str, Any]:
    await asyncio.sleep(60)
    return {"type": "http.disconnect"}


async def _fail() -> None:
    raise ValueError("of the request")


def test_work_that_fails_at_its_deadline_logs_nothing() -> None:
    async def scenario() -> list[dict[str, Any]]:
        loop, logged = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda _loop, context: logged.append(context))
        context = RequestContext(
            id="r",
            path="/",
            arrived_s=loop.time() - 1.0,
            trace_headers={},
            receive=_receive,
            deadline=Deadline(1e-9, loop.time() - 1.0),
        )
        with pytest.raises(RequestTimedOut):
            await with_deadline(context, _fail())
        gc.collect()
        await asyncio.sleep(0)
        return logged

    assert asyncio.run(scenario()) == []
