"""What several requests give is read as it comes, all that is there at once."""

from __future__ import annotations

import asyncio

import pytest

from swell.cluster.client.outputs import CompletionOutput, RequestOutput, RequestOutputKind
from swell.cluster.client.request_state import EngineGone, OutputBatch, Outputs, Ticket
from swell.engine.wire import EngineCoreRequest
from swell.worker.sample.wire import SamplerParams

DEADLINE_S = 5.0


def ticket(name: str) -> Ticket:
    return Ticket(EngineCoreRequest(name, [1], SamplerParams(), 9), RequestOutputKind.DELTA)


def output(text: str, *, finished: bool = False) -> RequestOutput:
    part = CompletionOutput(index=0, text=text, token_ids=[1], num_output_tokens=1)
    return RequestOutput(request_id="r", prompt_token_ids=[1], outputs=[part], finished=finished)


def texts(batch: OutputBatch) -> list[tuple[int, str]]:
    return [(number, one.outputs[0].text) for number, one in batch]


async def after(reader: Outputs, *puts: tuple[Ticket, RequestOutput]) -> list[tuple[int, str]]:
    """What a reader that waits already gets."""
    waiting = asyncio.ensure_future(anext(reader))
    await asyncio.sleep(0)
    for one, given in puts:
        one.collector.put(given)
    return texts(await asyncio.wait_for(waiting, DEADLINE_S))


def test_all_that_is_there_comes_at_once_and_what_was_not_taken_is_merged():
    async def read() -> None:
        one, two = ticket("a"), ticket("b")
        reader = Outputs([one, two])
        assert await after(reader, (two, output("x"))) == [(1, "x")]
        assert await after(reader, (one, output("y")), (two, output("z")), (one, output("!"))) == [
            (0, "y!"),
            (1, "z"),
        ]
        last = [(one, output("1", finished=True)), (two, output("2", finished=True))]
        assert await after(reader, *last) == [(0, "1"), (1, "2")]
        assert [batch async for batch in reader] == []

    asyncio.run(read())


def test_the_first_batch_can_be_looked_at_and_comes_again():
    async def read() -> None:
        one = ticket("a")
        one.collector.put(output("x", finished=True))
        reader = Outputs([one])
        first = await reader.first()
        assert [batch async for batch in reader] == [first]

    asyncio.run(read())


def test_what_was_there_comes_before_a_failure():
    async def read() -> None:
        one, two = ticket("a"), ticket("b")
        reader = Outputs([one, two])
        one.collector.put(output("x"))
        two.collector.put(EngineGone("no more"))
        assert texts(await anext(reader)) == [(0, "x")]
        with pytest.raises(EngineGone, match="no more"):
            await asyncio.wait_for(anext(reader), DEADLINE_S)

    asyncio.run(read())
