"""The outputs of parallel samples (children) join into one answer, in any order of arrival."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.cluster.client.requests.merged_outputs import (
    MergedOutputs,
    merge_outputs,
    select_best_of,
)
from swell.cluster.client.requests.output_processor import OutputProcessor
from swell.cluster.client.requests.outputs import (
    CompletionOutput,
    LogprobTable,
    RequestOutput,
    RequestOutputKind,
)
from swell.cluster.text.params.sampling_params import SamplingParams
from swell.cluster.text.tokens.detokenizer import Detokenizer
from swell.cluster.text.tokens.token_texts import TokenTexts
from swell.engine.wire import EngineCoreOutput
from tests.cluster.text.tokenizers_for_tests import byte_level
from tests.support.core_requests import core_request

CUMULATIVE, DELTA, FINAL = RequestOutputKind
TOKENIZER = byte_level()
DETOKENIZER = Detokenizer(TOKENIZER)

WORDS = st.lists(st.lists(st.integers(0, 99), max_size=2), min_size=1, max_size=4)
"""The outputs of one child: the tokens of each."""
LOGPROB = -0.25
"""The logprob of token t is t times this."""


def spoken(index: int, pieces: list[list[int]], kind: RequestOutputKind) -> Iterator[RequestOutput]:
    """Yields a child's outputs as an `OutputProcessor` makes them."""
    said: list[int] = []
    for place, piece in enumerate(pieces):
        said = said + piece
        last = place == len(pieces) - 1
        shown = piece if kind == DELTA else said
        part = CompletionOutput(
            index=index,
            text="".join(f"{token} " for token in shown),
            token_ids=list(shown),
            num_output_tokens=len(said),
            cumulative_logprob=LOGPROB * sum(said),
            finish_reason="length" if last else None,
        )
        if last or kind != FINAL:
            yield RequestOutput(
                request_id="r",
                prompt_token_ids=[1, 2, 3],
                outputs=[part],
                finished=last,
                num_cached_tokens=2 * index,
            )


def whole(index: int, pieces: list[list[int]]) -> CompletionOutput:
    (output,) = spoken(index, pieces, FINAL)
    return output.outputs[0]


class Children:
    """The children of one prompt, whose outputs are merged one after the other."""

    def __init__(self, params: SamplingParams, kind: RequestOutputKind) -> None:
        processor = OutputProcessor(DETOKENIZER)
        self.states = [
            processor.add_request(core_request(params, index), params, kind=kind, index=index)
            for index in range(params.num_children)
        ]
        self.merged = MergedOutputs(self.states, params, kind)

    def add(self, output: RequestOutput) -> RequestOutput | None:
        self.states[output.outputs[0].index].queue.put(output)
        batch = self.merged.take()
        return batch[0][1] if batch else None


def interleaved(
    data: st.DataObject, said: list[list[list[int]]], kind: RequestOutputKind
) -> Iterator[RequestOutput]:
    left = [list(spoken(index, pieces, kind)) for index, pieces in enumerate(said)]
    while any(left):
        speaker = data.draw(st.sampled_from([i for i, outputs in enumerate(left) if outputs]))
        yield left[speaker].pop(0)


@settings(max_examples=100, deadline=None)
@given(
    said=st.lists(WORDS, min_size=1, max_size=5),
    kind=st.sampled_from(RequestOutputKind),
    data=st.data(),
)
def test_every_child_is_reported_once_and_whole(said, kind, data) -> None:
    parent = Children(SamplingParams(n=len(said)), kind)
    got: list[RequestOutput] = []
    latest: dict[int, CompletionOutput] = {}
    for output in interleaved(data, said, kind):
        latest[output.outputs[0].index] = output.outputs[0]
        told = parent.add(output)
        if told is not None:
            got.append(told)
            assert (told.request_id, told.prompt_token_ids) == ("r", [1, 2, 3])
            if kind == DELTA:
                assert told.outputs == output.outputs
            else:
                assert told.outputs == [latest[index] for index in sorted(latest)]
    assert [output.finished for output in got] == [False] * (len(got) - 1) + [True]
    expected = [whole(index, pieces) for index, pieces in enumerate(said)]
    if kind == DELTA:
        for answer in expected:
            parts = [p for output in got for p in output.outputs if p.index == answer.index]
            assert "".join(part.text for part in parts) == answer.text
            assert [t for part in parts for t in part.token_ids] == answer.token_ids
            assert parts[-1].finish_reason == "length"
    else:
        assert got[-1].outputs == expected
        assert kind != FINAL or len(got) == 1
        assert got[-1].num_cached_tokens == 0, "what the first child found, others did not compute"
    assert parent.merged.num_output_tokens == sum(len(answer.token_ids) for answer in expected)


@settings(max_examples=100, deadline=None)
@given(
    said=st.lists(WORDS, min_size=2, max_size=5),
    kind=st.sampled_from(RequestOutputKind),
    logprobs=st.sampled_from([None, 0]),
    data=st.data(),
)
def test_the_best_are_those_with_the_largest_mean_logprob(said, kind, logprobs, data) -> None:
    n = data.draw(st.integers(1, len(said) - 1))
    params = SamplingParams(n=n, best_of=len(said), logprobs=logprobs)
    parent = Children(params, kind)
    told = [parent.add(output) for output in interleaved(data, said, kind)]
    assert told[:-1] == [None] * (len(told) - 1), "nobody is ranked before all have spoken"
    assert told[-1] is not None and told[-1].finished

    def rank(index: int) -> tuple[float, int]:
        tokens = [token for piece in said[index] for token in piece]
        mean = LOGPROB * sum(tokens) / len(tokens) if tokens else -math.inf
        return -mean, index

    order = sorted(range(len(said)), key=rank)[:n]
    assert [part.index for part in told[-1].outputs] == list(range(n))
    assert [part.token_ids for part in told[-1].outputs] == [
        whole(index, said[index]).token_ids for index in order
    ]
    asked = logprobs is not None
    assert all((part.cumulative_logprob is not None) == asked for part in told[-1].outputs)
    drawn = sum(len(piece) for pieces in said for piece in pieces)
    assert parent.merged.num_output_tokens == drawn, "also those that are left out"


def test_merged_outputs_finish_when_all_children_have() -> None:
    begun, ended = spoken(0, [[1], [2]], CUMULATIVE)
    other = list(spoken(1, [[3]], CUMULATIVE))
    assert not merge_outputs([begun, *other]).finished
    assert merge_outputs([*other, ended]).finished


def test_logprobs_that_were_not_requested_are_omitted() -> None:
    table = LogprobTable(TokenTexts(Detokenizer(TOKENIZER)))
    for asked, shown in ((None, None), (0, table)):
        outputs = list(spoken(0, [[1]], FINAL)) + list(spoken(1, [[2]], FINAL))
        for output in outputs:
            output.outputs[0].logprobs = table
        found = select_best_of(merge_outputs(outputs), SamplingParams(best_of=2, logprobs=asked))
        assert [part.logprobs for part in found.outputs] == [shown]


def test_if_one_child_fails_the_answer_has_failed() -> None:
    parent = Children(SamplingParams(n=3), FINAL)
    talk = [list(spoken(index, [[1], [2]], FINAL)) for index in range(3)]
    assert parent.add(talk[0][0]) is None
    failed = talk[1][0]
    failed.outputs[0].finish_reason, failed.outputs[0].stop_reason = "error", "no memory"
    assert parent.add(failed) is None
    assert parent.merged.failed_output is failed
    assert parent.add(talk[2][0]) is None, "the answers are not complete"


@pytest.mark.parametrize("best_of", [None, 3])
def test_an_abort_finishes_all_children_with_their_output_so_far(best_of) -> None:
    params = SamplingParams(n=2, best_of=best_of, max_tokens=9)
    processor = OutputProcessor(DETOKENIZER)
    states = [
        processor.add_request(core_request(params, index), params, kind=FINAL, index=index)
        for index in range(params.num_children)
    ]
    merged, ids = MergedOutputs(states, params, FINAL), [state.request_id for state in states]
    if best_of is None:
        processor.process_outputs([EngineCoreOutput(ids[1], [5])])
    assert [state.request_id for state in processor.abort_requests(ids)] == ids
    ((_, told),) = merged.take()
    assert told.finished
    assert [part.finish_reason for part in told.outputs] == ["abort", "abort"]
    drawn = [part.token_ids for part in told.outputs]
    assert drawn == ([[], [5]] if best_of is None else [[], []])
