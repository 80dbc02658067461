"""With `OutputsInTurn`, the order of outputs depends only on the answers, not on their timing."""

from __future__ import annotations

import asyncio
import random

from hypothesis import given
from hypothesis import strategies as st

from swell.cluster.client.requests.merged_outputs import OutputsInTurn
from swell.cluster.client.requests.output_processor import one_by_one
from swell.cluster.client.requests.outputs import (
    CompletionOutput,
    RequestOutput,
    RequestOutputKind,
    TokenQueue,
)
from swell.cluster.client.requests.request_state import RequestState
from swell.cluster.text.params.sampling_params import SamplingParams
from swell.engine.wire import EngineCoreOutput, FinishReason
from swell.worker.sampler_wire import PromptLogprobs, TokenLogprobs
from tests.cluster.client.requests.test_merged_outputs import states

DELTA = RequestOutputKind.DELTA


def output(token: int, *, finished: bool) -> RequestOutput:
    answer = CompletionOutput(
        index=0,
        text=f"{token} ",
        token_ids=[token],
        num_output_tokens=1,
        finish_reason="stop" if finished else None,
    )
    return RequestOutput(request_id="r", prompt_token_ids=[1], outputs=[answer], finished=finished)


def read(lengths: list[int], seed: int) -> list[tuple[int, int]]:
    """Produces answers of these lengths in a random order. Returns (request number, token) pairs as
    the reader gets them."""

    async def scenario() -> list[tuple[int, int]]:
        requests: list[RequestState] = states(len(lengths))
        for state in requests:
            state.queue = TokenQueue(DELTA)
        merged = OutputsInTurn(requests, SamplingParams(n=1), DELTA)
        left = [number for number, length in enumerate(lengths) for _ in range(length)]
        random.Random(seed).shuffle(left)
        put = [0] * len(lengths)

        async def produce() -> None:
            for number in left:
                queue = requests[number].queue
                assert queue is not None
                put[number] += 1
                queue.put(output(put[number], finished=put[number] == lengths[number]))
                if random.Random(seed + put[number]).random() < 0.5:
                    await asyncio.sleep(0)

        producing = asyncio.create_task(produce())
        batches = [batch async for batch in merged]
        await producing
        return [(number, one.outputs[0].token_ids[0]) for batch in batches for number, one in batch]

    return asyncio.run(scenario())


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 999))
def test_the_order_does_not_depend_on_arrival(lengths: list[int], seed: int) -> None:
    expected = [
        (number, turn)
        for turn in range(1, max(lengths) + 1)
        for number, length in enumerate(lengths)
        if turn <= length
    ]
    assert read(lengths, seed) == expected


@given(st.lists(st.integers(0, 9), max_size=5), st.booleans(), st.booleans())
def test_outputs_are_split_into_single_tokens_with_their_data(
    tokens: list[int], logprobs: bool, ends: bool
) -> None:
    prompt = PromptLogprobs(1, [[1]], [[0.0]], [1])
    rows = [TokenLogprobs([token], [-float(token)], 1) for token in tokens] if logprobs else []
    whole = EngineCoreOutput(
        "r",
        tokens,
        FinishReason.STOP if ends else None,
        7 if ends else None,
        num_cached_tokens=3,
        extras=[prompt, *rows],
        attempt=2,
    )
    pieces = one_by_one(whole)
    assert [token for piece in pieces for token in piece.new_token_ids] == tokens
    assert all(len(piece.new_token_ids) == 1 for piece in pieces) or pieces == (whole,)
    assert [extra for piece in pieces for extra in piece.extras] == whole.extras
    for piece, row in zip(pieces, rows, strict=False):
        assert row in piece.extras
    assert pieces[-1].finish_reason == whole.finish_reason
    assert pieces[-1].stop_reason == whole.stop_reason
    assert all(piece.finish_reason is None for piece in pieces[:-1])
    assert {piece.attempt for piece in pieces} == {2}
