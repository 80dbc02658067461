"""Work that is cancelled if its client disconnects, or from outside."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from swell.cluster.api.answers.disconnect import run_until_disconnect


async def never() -> Any:
    await asyncio.get_running_loop().create_future()


async def left() -> Any:
    return {"type": "http.disconnect"}


@pytest.mark.parametrize("turns", range(8))
def test_a_waiter_can_be_cancelled_at_any_moment(turns: int) -> None:
    """A cancellation stops the waiter even if the work has just finished, `turns` loop iterations
    ago."""

    async def scenario() -> None:
        ready = asyncio.get_running_loop().create_future()
        went_on = False

        async def wait() -> None:
            nonlocal went_on
            await run_until_disconnect(never, asyncio.wait_for(ready, None))
            await asyncio.sleep(3600)
            went_on = True

        waiting = asyncio.create_task(wait())
        for _ in range(3):
            await asyncio.sleep(0)
        ready.set_result(None)
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting}, timeout=1)
        assert waiting.cancelled() and not went_on
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())


def test_work_ends_with_its_client() -> None:
    async def scenario() -> None:
        ended = asyncio.Event()

        async def work() -> None:
            try:
                await never()
            finally:
                ended.set()

        with pytest.raises(ClientDisconnect):
            await run_until_disconnect(left, work())
        assert ended.is_set()

    asyncio.run(scenario())
