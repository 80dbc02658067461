"""Calls of engines' services, each with a deadline."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from swell.cluster.client.engine_core_client import EngineCoreClient, EngineId
from swell.coordinator.channel import CallTable, ChannelTimeout
from swell.engine.wire import UtilityCall, UtilityOutput


class EngineCallFailed(RuntimeError):
    """An engine's service raised; the message is the engine's."""


class EngineCalls:
    """The calls that wait for their answers."""

    def __init__(self, client: EngineCoreClient) -> None:
        self._client = client
        self._table: CallTable[UtilityOutput] = CallTable()

    async def call(self, engine: EngineId, method: str, args: list[Any], timeout_s: float) -> Any:
        """Raises EngineCallFailed with the engine's message, and TimeoutError without an answer in
        time."""
        future: asyncio.Future[UtilityOutput] = asyncio.get_running_loop().create_future()
        call_id = self._table.open(future, timeout_s)
        self._client.send(engine, UtilityCall(call_id, method, args))
        try:
            # An answer that is there counts, also if the loop was late and its time is over.
            if not (await asyncio.wait({future}, timeout=timeout_s))[0]:
                late = f"engine {engine.rank} did not answer {method!r} within {timeout_s:g} s"
                self._table.fail(call_id, ChannelTimeout(late))
        finally:
            self._table.expire()
        answer = await future
        if answer.failure_message is not None:
            raise EngineCallFailed(answer.failure_message)
        return msgspec.msgpack.decode(answer.result)

    def on_answer(self, answer: UtilityOutput) -> None:
        self._table.answer(answer.call_id, answer)
