"""Each result reaches its caller exactly once, or not at all if it is late."""

from __future__ import annotations

import asyncio
import itertools
import time
from concurrent.futures import Future

import pytest

from swell.cluster.client.engine_core_client import CallTable
from swell.coordinator.transport.channel import ChannelTimeout


def test_answers_reach_their_calls_by_id_in_any_order() -> None:
    table: CallTable[str] = CallTable(time.monotonic)
    for order in itertools.permutations(range(3)):
        futures: list[Future[str]] = [Future() for _ in range(3)]
        ids = [table.open(future, 60) for future in futures]
        assert len(set(ids)) == 3
        for index in order:
            table.answer(ids[index], str(index))
        assert [future.result(0) for future in futures] == ["0", "1", "2"]


def test_ids_are_never_used_twice() -> None:
    table: CallTable[str] = CallTable(time.monotonic)
    ids = []
    for _ in range(10):
        ids.append(table.open(Future(), 60))
        table.answer(ids[-1], "")
    assert len(set(ids)) == 10


def test_a_call_fails_at_its_deadline_and_not_before() -> None:
    table: CallTable[str] = CallTable(time.monotonic)
    short, long = Future(), Future()
    start = time.monotonic()
    short_id, long_id = table.open(short, 5), table.open(long, 500)
    table.expire(start + 4.9)
    assert not short.done()
    table.expire(start + 100)
    assert not long.done()
    with pytest.raises(ChannelTimeout, match=f"call {short_id} "):
        short.result(0)
    table.answer(short_id, "late")
    table.answer(long_id, "in time")
    assert long.result(0) == "in time"
    table.expire()


def test_late_unknown_and_repeated_answers_are_dropped() -> None:
    table: CallTable[str] = CallTable(time.monotonic)
    future: Future[str] = Future()
    call_id = table.open(future, 60)
    table.answer(999, "unknown")
    table.answer(call_id, "first")
    table.answer(call_id, "second")
    table.fail(call_id, RuntimeError("third"))
    assert future.result(0) == "first"


def test_an_answer_to_a_cancelled_caller_is_dropped() -> None:
    async def call() -> None:
        table: CallTable[str] = CallTable(time.monotonic)
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in range(3)]
        ids = [table.open(future, 0.0) for future in futures]
        for future in futures:
            future.cancel()
        table.answer(ids[0], "x")
        table.fail(ids[1], RuntimeError("x"))
        table.expire(time.monotonic() + 1)
        assert all(future.cancelled() for future in futures)

    asyncio.run(call())


def test_a_failure_reaches_its_caller() -> None:
    table: CallTable[str] = CallTable(time.monotonic)
    future: Future[str] = Future()
    table.fail(table.open(future, 60), RuntimeError("no"))
    with pytest.raises(RuntimeError, match="no"):
        future.result(0)
