"""A reader of several requests gets all available outputs of all of them at once."""

from __future__ import annotations

import asyncio

import hypothesis.strategies as st
import pytest
from hypothesis import given

from swell.cluster.client.requests.merged_outputs import MergedOutputs, OutputBatch, OutputsInTurn
from swell.cluster.client.requests.output_processor import OutputProcessor
from swell.cluster.client.requests.outputs import (
    CompletionOutput,
    RequestOutput,
    RequestOutputCollector,
    RequestOutputKind,
    TokenQueue,
)
from swell.cluster.client.requests.request_state import (
    EngineGone,
    RequestFailed,
    RequestInvalid,
    RequestState,
)
from swell.cluster.text.params.sampling_params import SamplingParams
from swell.cluster.text.tokens.detokenizer import Detokenizer
from swell.engine.wire import EngineCoreRequest
from swell.worker.sampler_wire import SamplerParams
from tests.cluster.text.tokenizers_for_tests import byte_level
from tests.support.deadlines import HANG_S

DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
PROCESSOR = OutputProcessor(Detokenizer(byte_level()))


def states(
    count: int,
    kind: RequestOutputKind = DELTA,
    collector: type[RequestOutputCollector] = RequestOutputCollector,
) -> list[RequestState]:
    PROCESSOR.request_states.clear()
    return [
        PROCESSOR.add_request(
            EngineCoreRequest(f"r{number}", [1], SamplerParams(), 9),
            SamplingParams(),
            kind=kind,
            queue=collector(kind),
        )
        for number in range(count)
    ]


def put(state: RequestState, output: RequestOutput | Exception) -> None:
    assert state.queue is not None
    state.queue.put(output)


def output(text: str, *, finished: bool = False, index: int = 0) -> RequestOutput:
    part = CompletionOutput(index=index, text=text, token_ids=[1], num_output_tokens=1)
    return RequestOutput(request_id="r", prompt_token_ids=[1], outputs=[part], finished=finished)


def texts(batch: OutputBatch) -> list[tuple[int, str]]:
    return [(number, one.outputs[0].text) for number, one in batch]


async def after(
    reader: MergedOutputs, *puts: tuple[RequestState, RequestOutput]
) -> list[tuple[int, str]]:
    """Returns what a waiting reader gets when these outputs are put."""
    waiting = asyncio.ensure_future(anext(reader))
    await asyncio.sleep(0)
    for one, what in puts:
        put(one, what)
    return texts(await asyncio.wait_for(waiting, HANG_S))


def test_pending_outputs_are_merged_and_returned_together():
    async def read() -> None:
        one, two = states(2)
        reader = MergedOutputs([one, two], SamplingParams(), DELTA)
        assert await after(reader, (two, output("x"))) == [(1, "x")]
        assert await after(reader, (one, output("y")), (two, output("z")), (one, output("!"))) == [
            (0, "y!"),
            (1, "z"),
        ]
        last = [(one, output("1", finished=True)), (two, output("2", finished=True))]
        assert await after(reader, *last) == [(0, "1"), (1, "2")]
        assert [batch async for batch in reader] == []

    asyncio.run(read())


def test_outputs_that_arrive_while_the_reader_is_busy_are_ready_at_once():
    async def read() -> None:
        (one,) = states(1)
        reader = MergedOutputs([one], SamplingParams(), DELTA)
        assert await after(reader, (one, output("x"))) == [(0, "x")]
        put(one, output("y"))
        assert texts(await asyncio.wait_for(anext(reader), HANG_S)) == [(0, "y")]
        assert await after(reader, (one, output("z", finished=True))) == [(0, "z")]

    asyncio.run(read())


def test_the_first_batch_can_be_peeked():
    async def read() -> None:
        (one,) = states(1)
        put(one, output("x", finished=True))
        reader = MergedOutputs([one], SamplingParams(), DELTA)
        first = await reader.first()
        assert [batch async for batch in reader] == [first]

    asyncio.run(read())


def test_pending_outputs_precede_a_failure():
    async def read() -> None:
        one, two = states(2)
        reader = MergedOutputs([one, two], SamplingParams(), DELTA)
        put(one, output("x"))
        put(two, EngineGone("no more"))
        assert texts(await anext(reader)) == [(0, "x")]
        with pytest.raises(EngineGone, match="no more"):
            await asyncio.wait_for(anext(reader), HANG_S)

    asyncio.run(read())


def test_a_failure_follows_the_pending_output_of_its_request():
    async def read() -> None:
        (one,) = states(1)
        reader = MergedOutputs([one], SamplingParams(), DELTA)
        assert await after(reader, (one, output("x")), (one, EngineGone("no more"))) == [(0, "x")]
        with pytest.raises(EngineGone, match="no more"):
            await asyncio.wait_for(anext(reader), HANG_S)

    asyncio.run(read())


@pytest.mark.parametrize("reason", ["error", "invalid"])
def test_a_failed_output_does_not_replace_the_text_before_it(reason: str):
    async def read() -> None:
        (one,) = states(1)
        reader = MergedOutputs([one], SamplingParams(), DELTA)
        failed = output("", finished=True)
        failed.outputs[0].finish_reason, failed.outputs[0].stop_reason = reason, "no memory"
        assert await after(reader, (one, output("x")), (one, failed)) == [(0, "x")]
        with pytest.raises((RequestFailed, RequestInvalid), match="no memory"):
            await asyncio.wait_for(anext(reader), HANG_S)

    asyncio.run(read())


STEPS = st.tuples(st.integers(0, 2), st.sampled_from(["delta", "last", "fail", "pause"]))


@pytest.mark.parametrize("merge", [MergedOutputs, OutputsInTurn])
@given(st.lists(STEPS, max_size=24))
def test_a_reader_gets_all_outputs_and_an_end_whenever_they_come(
    merge: type[MergedOutputs], steps: list[tuple[int, str]]
) -> None:
    """At `pause`, the reader runs. It never waits if output is available, except that
    `OutputsInTurn` may wait for the request whose turn it is."""

    async def read() -> None:
        collector = TokenQueue if merge is OutputsInTurn else RequestOutputCollector
        requests = states(3, DELTA, collector)
        reader = merge(requests, SamplingParams(n=3), DELTA)
        got = ["", "", ""]

        async def take() -> None:
            async for batch in reader:
                for number, one in batch:
                    got[number] += one.outputs[0].text

        sent, ended, failed = ["", "", ""], set(), False
        taking = asyncio.ensure_future(take())
        every_end = [(number, "last") for number in range(3)]
        for number, step in [*steps, (0, "pause"), *every_end, (0, "pause")]:
            if step == "pause":
                for _ in range(30):
                    await asyncio.sleep(0)
                assert taking.done() or not failed or merge is OutputsInTurn, "it waits for more"
            elif number in ended:
                continue
            elif step == "fail":
                put(requests[number], EngineGone("no more"))
                failed = True
                ended.add(number)
            else:
                text = str(len(sent[number]) % 10)
                put(requests[number], output(text, finished=step == "last", index=number))
                sent[number] += text
                ended |= {number} if step == "last" else set()
        assert taking.done(), "it waits for more"
        if failed:
            assert isinstance(taking.exception(), EngineGone)
            assert all(whole.startswith(part) for whole, part in zip(sent, got, strict=True))
        else:
            assert taking.exception() is None and got == sent

    asyncio.run(read())


def test_answers_to_each_prompt_are_merged_when_all_are_complete():
    async def read() -> None:
        params = SamplingParams(n=2)
        requests = states(4, FINAL)
        reader = MergedOutputs(requests, params, FINAL)
        waiting = asyncio.ensure_future(reader.whole())
        for number in (3, 0, 2, 1):
            await asyncio.sleep(0)
            assert not waiting.done()
            put(requests[number], output(str(number), finished=True, index=number % 2))
        prompts = await asyncio.wait_for(waiting, HANG_S)
        assert [[a.text for a in p.outputs] for p in prompts] == [["0", "1"], ["2", "3"]]
        assert all(prompt.finished for prompt in prompts)
        assert reader.num_output_tokens == 4

    asyncio.run(read())


@pytest.mark.parametrize("kind", [DELTA, FINAL])
def test_a_failed_request_ends_all_after_their_pending_outputs(kind: RequestOutputKind):
    async def read() -> None:
        requests = states(3, kind)
        reader = MergedOutputs(requests, SamplingParams(n=3), kind)
        failed = output("", finished=True, index=1)
        failed.outputs[0].finish_reason, failed.outputs[0].stop_reason = "error", "no memory"
        put(requests[0], output("x"))
        put(requests[1], failed)
        if kind == DELTA:
            assert texts(await anext(reader)) == [(0, "x")]
        for _ in range(2):
            with pytest.raises(RequestFailed, match="no memory"):
                await asyncio.wait_for(anext(reader), HANG_S)

    asyncio.run(read())


def test_the_ranks_that_served_are_listed_in_order():
    one, two = states(2)
    one.ranks, two.ranks = [0, 0], [1, 0]
    assert MergedOutputs([one], SamplingParams(), DELTA).served_ranks == "0,0"
    assert MergedOutputs([one, two], SamplingParams(), DELTA).served_ranks == "0,1"
