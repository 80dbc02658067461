"""Pooled vectors on their way from an engine to the client."""

from __future__ import annotations

import struct

import pytest

from swell.cluster.client.requests.output_processor import OutputProcessor
from swell.cluster.client.requests.outputs import RequestOutputKind
from swell.cluster.client.requests.pooling_outputs import cosines, float_values, vector_of
from swell.cluster.client.requests.request_state import MigrationReason
from swell.cluster.client.requests.stats import IterationStats, StatsSink
from swell.cluster.text.params.sampling_params import SamplingParams
from swell.cluster.text.tokens.detokenizer import Detokenizer
from swell.engine.wire import EngineCoreOutput, EngineCoreRequest, FinishReason
from swell.worker.sampler_wire import PooledValues, PoolingParams, SamplerParams
from tests.cluster.text import tokenizers_for_tests
from tests.support.core_requests import outputs_after

VECTOR = [1.5, -2.0, 0.25]
DATA = struct.pack("<3f", *VECTOR)


class Sink(StatsSink):
    def __init__(self) -> None:
        self.seen: list[IterationStats] = []

    def record(self, stats: IterationStats) -> None:
        self.seen.append(stats)


def output(attempt: int = 1) -> EngineCoreOutput:
    extras = [PooledValues(DATA)]
    return EngineCoreOutput("r", [], FinishReason.STOP, None, 2, 0.5, 0, extras, attempt)


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def processor(sink: Sink) -> OutputProcessor:
    detokenizer = Detokenizer(tokenizers_for_tests.chat_tokenizer())
    now_s = [4.0]
    processor = OutputProcessor(detokenizer, stats=sink, clock=lambda: now_s[0])
    request = EngineCoreRequest("r", [1, 2, 3], SamplerParams(pooling=PoolingParams()), 0)
    kind = RequestOutputKind.FINAL_ONLY
    processor.add_request(request, SamplingParams(), kind=kind)
    now_s[0] = 7.0
    return processor


def test_a_vector_finishes_its_request_and_counts_its_prompt(processor, sink):
    (answer,) = outputs_after(processor, [output()])
    assert answer.finished and vector_of(answer) == VECTOR
    assert (answer.outputs[0].text, answer.outputs[0].num_output_tokens) == ("", 0)
    assert answer.num_cached_tokens == 2
    assert not processor.request_states
    (stats,) = sink.seen
    assert (stats.num_prompt_tokens, stats.num_output_tokens) == (3, 0)
    assert stats.time_to_first_token_s == []
    (finished,) = stats.finished
    assert (finished.finish_reason, finished.e2e_s, finished.queue_s) == ("stop", 3.0, 0.5)


def test_after_a_failover_a_late_vector_is_ignored(processor):
    state = processor.request_states["r"]
    state.unassign(MigrationReason.DIED)
    again = state.engine_request()
    assert (again.attempt, again.max_tokens, again.output_token_ids) == (2, 0, [])
    assert again.sampler.pooling == PoolingParams()
    assert not outputs_after(processor, [output(attempt=1)])
    (answer,) = outputs_after(processor, [output(attempt=2)])
    assert vector_of(answer) == VECTOR


def test_an_error_is_not_read_as_a_vector(processor):
    failed = EngineCoreOutput("r", [], FinishReason.ERROR, "NaN or infinite")
    (answer,) = outputs_after(processor, [failed])
    assert answer.outputs[0].finish_reason == "error"
    with pytest.raises(RuntimeError, match="request r: NaN or infinite"):
        vector_of(answer)


def test_cosines_of_one_vector_with_all_and_of_pairs():
    assert float_values(DATA) == VECTOR
    assert cosines([[0.6, 0.8], [1.0, 0.0], [0.0, -1.0]], 1) == [0.6, -0.8]
    assert cosines([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8], [0.8, -0.6]], 2) == [0.6, -0.6]


def test_no_cosine_is_above_1():
    long = [1.0 + 1e-9, 0.0]
    assert cosines([long, long, [-1.0 - 1e-9, 0.0]], 1) == [1.0, -1.0]
