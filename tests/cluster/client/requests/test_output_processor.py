"""The output loop: no token is lost or repeated, stops and finishes are right, and statistics
follow the clock."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.cluster.client.metrics import PrometheusStats
from swell.cluster.client.requests.output_processor import OutputProcessor
from swell.cluster.client.requests.outputs import (
    RequestOutput,
    RequestOutputCollector,
    RequestOutputKind,
)
from swell.cluster.client.requests.request_state import MigrationReason
from swell.cluster.client.requests.stats import IterationStats
from swell.cluster.text.params.sampling_params import SamplingParams
from swell.cluster.text.tokens.detokenizer import Detokenizer
from swell.engine.wire import EngineCoreOutput, EngineCoreRequest, FinishReason
from swell.worker.sampler_wire import PromptLogprobs, TokenLogprobs
from tests.cluster.text import tokenizers_for_tests as made
from tests.support.core_requests import core_request, outputs_after

TOKENIZER = made.byte_level()
SHARED = Detokenizer(TOKENIZER)
EOS = TOKENIZER.token_to_id("<|im_end|>")
DELTA, CUMULATIVE, FINAL = (
    RequestOutputKind.DELTA,
    RequestOutputKind.CUMULATIVE,
    RequestOutputKind.FINAL_ONLY,
)


def processor(**kwargs: Any) -> OutputProcessor:
    return OutputProcessor(SHARED, **kwargs)


def core(params: SamplingParams, external: str = "r") -> EngineCoreRequest:
    return core_request(
        params, external_req_id=external, prompt_token_ids=[1, 2, 3], eos_token_ids=[EOS]
    )


def steps(
    request_id: str, ids: list[int], sizes: list[int], reason: FinishReason | None
) -> Iterator[EngineCoreOutput]:
    """Yields `ids` in groups whose sizes cycle through `sizes`. The last one carries the finish
    reason."""
    at, turn = 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        last = at + size >= len(ids)
        yield EngineCoreOutput(request_id, ids[at : at + size], reason if last else None)
        at, turn = at + size, turn + 1


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)
IDS = st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), min_size=1, max_size=30)


@settings(max_examples=100, deadline=None)
@given(IDS, SIZES, st.sampled_from(RequestOutputKind), st.integers(1, 5), st.data())
def test_a_reader_of_any_speed_gets_everything_once(
    ids: list[int], sizes: list[int], kind: RequestOutputKind, interval: int, data: st.DataObject
) -> None:
    out = processor(stream_interval=interval)
    request = core(SamplingParams(max_tokens=99))
    collector = RequestOutputCollector(kind)
    out.add_request(request, SamplingParams(max_tokens=99), kind=kind, queue=collector)
    got: list[RequestOutput] = []
    for output in steps(request.request_id, ids, sizes, FinishReason.LENGTH):
        out.process_outputs([output])
        taken = collector.get_nowait() if data.draw(st.booleans()) else None
        got += [] if taken is None else [taken]
    last = collector.get_nowait()
    got += [] if last is None else [last]
    assert [output.finished for output in got] == [False] * (len(got) - 1) + [True]
    answers = [output.outputs[0] for output in got]
    whole_text, whole_ids = TOKENIZER.decode(ids), ids
    if kind == DELTA:
        assert "".join(answer.text for answer in answers) == whole_text
        assert [i for answer in answers for i in answer.token_ids] == whole_ids
    else:
        assert (answers[-1].text, answers[-1].token_ids) == (whole_text, whole_ids)
        assert all(whole_text.startswith(answer.text) for answer in answers)
    assert answers[-1].num_output_tokens == len(ids)
    assert answers[-1].finish_reason == "length"
    assert kind != FINAL or len(got) == 1
    assert not out.request_states


@settings(max_examples=100, deadline=None)
@given(
    st.text("abc .", min_size=1, max_size=20),
    st.lists(st.text("abc .", min_size=1, max_size=3), max_size=3),
    st.booleans(),
    st.integers(0, 5),
    SIZES,
)
def test_stops_do_not_depend_on_steps(
    text: str, stops: list[str], include: bool, min_tokens: int, sizes: list[int]
) -> None:
    params = SamplingParams(
        stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=99
    )
    results = []
    for split in ([1], sizes, [1000]):
        out = processor()
        request = core(params)
        out.add_request(request, params, kind=FINAL)
        given_outputs: list[RequestOutput] = []
        for output in steps(request.request_id, ids_of(text), split, FinishReason.LENGTH):
            given_outputs += outputs_after(out, [output])
        (final,) = given_outputs
        answer = final.outputs[0]
        results.append((answer.text, answer.token_ids, answer.finish_reason, answer.stop_reason))
        assert answer.token_ids == ids_of(text)[: len(answer.token_ids)]
    assert results[0] == results[1] == results[2]


def test_a_stop_string_finishes_the_request_and_aborts_it_at_the_engine() -> None:
    params = SamplingParams(stop=["fox"])
    out, request = processor(), core(params)
    state = out.add_request(request, params, kind=DELTA)
    ids = ids_of("the quick fox jumps over")
    text, aborts, used = "", [], 0
    for token_id in ids:
        result = out.process_outputs([EngineCoreOutput(request.request_id, [token_id])])
        aborts += [state.request_id for state in result.reqs_to_abort]
        output = state.queue.get_nowait()
        if output is not None:
            text += output.outputs[0].text
            used += len(output.outputs[0].token_ids)
            reason = (output.outputs[0].finish_reason, output.outputs[0].stop_reason)
    assert text == "the quick "
    assert reason == ("stop", "fox")
    assert aborts == [request.request_id]
    assert "fox" in TOKENIZER.decode(ids[:used])
    assert "fox" not in TOKENIZER.decode(ids[: used - 1])


def test_a_request_that_the_engine_finished_is_not_aborted() -> None:
    params = SamplingParams(stop=["fox"])
    out, request = processor(), core(params)
    out.add_request(request, params)
    output = EngineCoreOutput(request.request_id, ids_of("a fox"), FinishReason.LENGTH)
    assert out.process_outputs([output]).reqs_to_abort == []


@pytest.mark.parametrize("include", [True, False])
def test_the_stop_token_is_in_the_ids_and_its_text_only_on_request(include: bool) -> None:
    stop = ids_of(".")[0]
    params = SamplingParams(stop_token_ids=[stop], include_stop_str_in_output=include)
    out, request = processor(), core(params)
    out.add_request(request, params)
    ids = [*ids_of("fox"), stop]
    output = EngineCoreOutput(request.request_id, ids, FinishReason.STOP, stop)
    answer = outputs_after(out, [output])[0].outputs[0]
    assert answer.token_ids == ids
    assert answer.text == ("fox." if include else "fox")
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)


def test_text_held_for_a_stop_string_is_released_at_the_end() -> None:
    params = SamplingParams(stop=["foxes"])
    out, request = processor(), core(params)
    out.add_request(request, params, kind=DELTA)
    shown = []
    for output in steps(request.request_id, ids_of("a fox"), [1], FinishReason.LENGTH):
        shown += [o.outputs[0].text for o in outputs_after(out, [output])]
    assert "".join(shown) == "a fox"
    assert "fox" not in "".join(shown[:-1])


def test_the_first_token_is_sent_at_once_for_every_interval() -> None:
    out = processor(stream_interval=4)
    params = SamplingParams()
    request = core(params)
    out.add_request(request, params, kind=DELTA)
    sent = []
    for output in steps(request.request_id, ids_of("the quick brown")[:10] * 2, [1], None):
        sent.append(len(outputs_after(out, [output])))
    assert sent[:9] == [1, 0, 0, 0, 1, 0, 0, 0, 1]


@pytest.mark.parametrize(("server", "request_", "gap"), [(1, 3, 3), (4, 2, 4), (2, None, 2)])
def test_a_request_may_have_its_outputs_less_often_but_not_more_often_than_the_server(
    server: int, request_: int | None, gap: int
) -> None:
    out, params = processor(stream_interval=server), SamplingParams(stream_interval=request_)
    request = core(params)
    out.add_request(request, params)
    sent = [
        len(outputs_after(out, [output]))
        for output in steps(request.request_id, ids_of("a" * 30), [1], None)
    ]
    assert [place for place, count in enumerate(sent) if count][:4] == [0, gap, 2 * gap, 3 * gap]


def test_an_abort_returns_the_output_so_far() -> None:
    params = SamplingParams(stop=["foxes"])
    out = processor()
    requests = [core(params, "same"), core(params, "same"), core(params, "other")]
    collectors = [RequestOutputCollector(CUMULATIVE) for _ in requests]
    for request, collector in zip(requests, collectors, strict=True):
        out.add_request(request, params, kind=CUMULATIVE, queue=collector)
        out.process_outputs([EngineCoreOutput(request.request_id, ids_of("a fox"))])
    ids = [request.request_id for request in requests]
    assert [s.request_id for s in out.abort_requests([*ids[:2], "unknown"])] == ids[:2]
    assert out.abort_requests(["same"]) == [], "an external id"
    assert [s.request_id for s in out.abort_requests([ids[2], ids[2]])] == ids[2:]
    for collector in collectors:
        last = collector.get_nowait()
        assert last is not None and last.finished
        assert (last.outputs[0].text, last.outputs[0].finish_reason) == ("a fox", "abort")
    assert not out.request_states
    late = out.process_outputs([EngineCoreOutput(ids[0], [1])])
    assert (late.finished, late.reqs_to_abort) == ([], [])


def test_an_abort_with_undecodable_text_fails_only_its_request() -> None:
    out, params = processor(), SamplingParams()
    states = []
    for name in ("broken", "whole"):
        collector = RequestOutputCollector(CUMULATIVE)
        states.append(out.add_request(core(params, name), params, kind=CUMULATIVE, queue=collector))
    states[0]._text.finish = lambda _num_tokens: 1 / 0
    assert out.abort_requests([state.request_id for state in states]) == states
    assert not out.request_states
    reasons = [state.queue.get_nowait().outputs[0].finish_reason for state in states]
    assert reasons == ["error", "abort"]


def test_an_error_reaches_every_request_after_its_outputs() -> None:
    async def run() -> None:
        out, params = processor(), SamplingParams()
        collectors = []
        for index in range(3):
            request = core(params, f"r{index}")
            collectors.append(RequestOutputCollector(DELTA, request.request_id))
            out.add_request(request, params, queue=collectors[-1])
        out.process_outputs([EngineCoreOutput(collectors[0].request_id, ids_of("fox"))])
        waiting = [asyncio.create_task(collector.ready.wait()) for collector in collectors[1:]]
        await asyncio.sleep(0)
        ended = out.propagate_error(RuntimeError("gone"), [collectors[0].request_id])
        assert [state.request_id for state in ended] == [collectors[0].request_id]
        assert len(out.propagate_error(RuntimeError("gone"))) == 2
        await asyncio.wait_for(asyncio.gather(*waiting), 5)
        before = collectors[0].get_nowait()
        assert before is not None and before.outputs[0].text == "fox"
        for failed in [*collectors, *collectors]:
            with pytest.raises(RuntimeError, match="gone"):
                failed.get_nowait()
        assert not out.request_states

    asyncio.run(run())


@settings(max_examples=60, deadline=None)
@given(IDS, st.integers(0, 29), SIZES, st.lists(st.text("abe ", min_size=1), max_size=2))
def test_a_resubmission_continues_after_the_outputs_of_the_first_attempt(
    ids: list[int], lost_at: int, sizes: list[int], stops: list[str]
) -> None:
    """Text, ids and finish reason equal those of an undisturbed run."""
    params = SamplingParams(stop=stops, max_tokens=99)
    results = []
    for disturbed in (False, True):
        out, request = processor(), core(params)
        state = out.add_request(request, params, kind=FINAL)
        cut = min(lost_at, len(ids) - 1) if disturbed else 0
        outputs = [
            EngineCoreOutput(request.request_id, [i], num_cached_tokens=2) for i in ids[:cut]
        ]
        got = outputs_after(out, outputs)
        if not got:
            state.unassign(MigrationReason.DIED)
            again = state.engine_request()
            assert (again.output_token_ids, again.attempt) == (ids[:cut], 2)
            assert (again.request_id, again.sampler) == (request.request_id, request.sampler)
            rest = steps(request.request_id, ids[cut:], sizes, FinishReason.LENGTH)
            got = outputs_after(
                out, [msgspec.structs.replace(output, attempt=2) for output in rest]
            )
        results.append((got[0].outputs[0], got[0].num_cached_tokens))
    assert results[0][0] == results[1][0]


def test_cached_tokens_come_from_the_first_attempt() -> None:
    out, params = processor(), SamplingParams()
    request = core(params)
    out.add_request(request, params)
    outputs = [
        EngineCoreOutput(request.request_id, [5], num_cached_tokens=2),
        EngineCoreOutput(request.request_id, [5], FinishReason.LENGTH, num_cached_tokens=3),
    ]
    results = [result for output in outputs for result in outputs_after(out, [output])]
    assert [output.num_cached_tokens for output in results] == [2, 2]


def test_an_engine_error_is_reported_with_its_message() -> None:
    out, params = processor(), SamplingParams()
    request = core(params)
    out.add_request(request, params)
    output = EngineCoreOutput(request.request_id, [], FinishReason.ERROR, "no memory")
    answer = outputs_after(out, [output])[0].outputs[0]
    assert (answer.finish_reason, answer.stop_reason) == ("error", "no memory")


class Recorder:
    def __init__(self) -> None:
        self.all = IterationStats()

    def record(self, stats: IterationStats) -> None:
        for name in stats.__struct_fields__:
            setattr(self.all, name, getattr(self.all, name) + getattr(stats, name))


def scripted(out: OutputProcessor, clock: list[float]) -> None:
    """The request arrives at 10 and is queued for 0.5 s. Tokens arrive at 12 (one), 13 (two) and 17
    (one, the last)."""
    params = SamplingParams()
    request = core(params)
    clock[0] = 10.0
    out.add_request(request, params)
    script: list[tuple[float, list[int], FinishReason | None]] = [
        (12.0, [5], None),
        (13.0, [6, 7], None),
        (17.0, [8], FinishReason.LENGTH),
    ]
    for now, ids, reason in script:
        clock[0] = now
        out.process_outputs(
            [EngineCoreOutput(request.request_id, ids, reason, queue_s=0.5 if now == 12 else 0)]
        )


def test_statistics_follow_a_scripted_clock() -> None:
    clock, seen = [0.0], Recorder()
    scripted(processor(stats=seen, clock=lambda: clock[0]), clock)
    stats = seen.all
    assert stats.time_to_first_token_s == [2.0]
    assert stats.inter_token_latency_s == [0.5, 0.5, 4.0]
    assert (stats.num_prompt_tokens, stats.num_output_tokens) == (3, 4)
    (request,) = stats.finished
    assert (request.e2e_s, request.queue_s, request.prefill_s, request.decode_s) == (7, 0.5, 1.5, 5)
    assert (request.finish_reason, request.num_output_tokens) == ("length", 4)


def test_metrics_have_the_contracts_names_and_values() -> None:
    clock, stats = [0.0], PrometheusStats()
    stats.set_other_counts({})
    out = processor(stats=stats, clock=lambda: clock[0])
    scripted(out, clock)
    params = SamplingParams()
    request = core(params)
    out.add_request(request, params)
    out.abort_requests([request.request_id])
    text = stats.render().decode()
    for line in (
        "swell_time_to_first_token_seconds_sum 2.0",
        "swell_inter_token_latency_seconds_count 3.0",
        "swell_inter_token_latency_seconds_sum 5.0",
        'swell_request_success_total{finished_reason="length"} 1.0',
        'swell_request_success_total{finished_reason="abort"} 1.0',
        'swell_request_success_total{finished_reason="stop"} 0.0',
        "swell_prompt_tokens_total 3.0",
        "swell_generation_tokens_total 4.0",
        "swell_request_prefill_time_seconds_sum 1.5",
        "swell_request_decode_time_seconds_sum 5.0",
    ):
        assert re.search(f"^{re.escape(line)}$", text, re.MULTILINE), line
    assert PrometheusStats().registry is not stats.registry


# ---------------------------------------------------------------- log probabilities


def logprob_of(token_id: int) -> float:
    return -token_id / 64  # sums of it are exact


def with_logprobs(outputs: Iterator[EngineCoreOutput]) -> Iterator[EngineCoreOutput]:
    """Adds logprobs: each token, and one other token that is more likely."""
    for output in outputs:
        extras = [
            TokenLogprobs([i, i + 1], [logprob_of(i), -0.25], i % 5 + 2)
            for i in output.new_token_ids
        ]
        yield msgspec.structs.replace(output, extras=extras)


@settings(max_examples=100, deadline=None)
@given(
    st.text("abc .", min_size=1, max_size=20),
    st.lists(st.text("abc .", min_size=1, max_size=3), max_size=2),
    SIZES,
    st.sampled_from(RequestOutputKind),
    st.integers(1, 4),
    st.data(),
)
def test_logprobs_go_with_their_tokens(
    text: str,
    stops: list[str],
    sizes: list[int],
    kind: RequestOutputKind,
    interval: int,
    data: st.DataObject,
) -> None:
    """This holds for every output kind, for readers of any speed, and up to the token that
    completes a stop string."""
    params = SamplingParams(stop=stops, logprobs=1)
    out, request = processor(stream_interval=interval), core(params)
    collector = RequestOutputCollector(kind)
    out.add_request(request, params, kind=kind, queue=collector)
    got = []
    for output in with_logprobs(steps(request.request_id, ids_of(text), sizes, FinishReason.STOP)):
        out.process_outputs([output])
        if data.draw(st.booleans()) and (taken := collector.get_nowait()):
            got.append(taken.outputs[0])
    got += [last.outputs[0]] if (last := collector.get_nowait()) else []
    so_far: list[int] = []
    for answer in got:
        so_far = [*so_far, *answer.token_ids] if kind == DELTA else answer.token_ids
        assert answer.logprobs is not None
        assert len(answer.logprobs) == len(answer.token_ids)
        for token_id, position in zip(answer.token_ids, answer.logprobs, strict=True):
            assert position is not None
            assert list(position) == [token_id, token_id + 1]
            told = position[token_id]
            assert (told.logprob, told.rank) == (logprob_of(token_id), token_id % 5 + 2)
            assert (position[token_id + 1].logprob, position[token_id + 1].rank) == (-0.25, 1)
            assert told.decoded_token == TOKENIZER.decode([token_id])
        assert answer.cumulative_logprob == sum(map(logprob_of, so_far))


def test_logprobs_that_were_not_requested_are_absent() -> None:
    out, params = processor(), SamplingParams()
    request = core(params)
    out.add_request(request, params)
    (output,) = outputs_after(out, [EngineCoreOutput(request.request_id, [5])])
    answer = output.outputs[0]
    assert (answer.logprobs, answer.cumulative_logprob, output.prompt_logprobs) == (None,) * 3


def test_missing_logprobs_fail_only_the_request_that_needs_them() -> None:
    out, asking, silent = processor(), SamplingParams(logprobs=1), SamplingParams()
    requests = [core(asking, "asking"), core(silent, "silent")]
    states = [
        out.add_request(request, params)
        for request, params in zip(requests, (asking, silent), strict=True)
    ]
    result = out.process_outputs([EngineCoreOutput(r.request_id, [5]) for r in requests])
    reasons = [state.queue.get_nowait().outputs[0].finish_reason for state in states]
    assert reasons == ["error", None] and result.finished == states[:1]
    assert [s.request_id for s in result.reqs_to_abort] == [requests[0].request_id]


PROMPT_TOLD = [(2, 9), (3, 8)]
"""For positions 1 and 2 of `core`'s prompt 1 2 3: the prompt token and a more likely one."""


def of_prompt(request_id: str, start: int, logprob: float, ids: list[int]) -> EngineCoreOutput:
    """Returns an output with the prompt logprobs from position `start` on, and with tokens."""
    columns = [list(pair) for pair in PROMPT_TOLD[start - 1 :]]
    extra = PromptLogprobs(start, columns, [[logprob, -0.5]] * len(columns), [2] * len(columns))
    return EngineCoreOutput(request_id, ids, extras=[extra])


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
def test_prompt_logprobs_are_reported_once_over_a_failover(kind: RequestOutputKind) -> None:
    """A part of the prompt logprobs arrives, then the engine is lost. The second attempt reports
    them all again, and once more after that: the first report of a position counts. Known positions
    are not requested again."""
    params = SamplingParams(prompt_logprobs=1)
    out, request = processor(), core(params)
    state = out.add_request(request, params, kind=kind)
    assert state.engine_request() is request

    first = msgspec.structs.replace(
        of_prompt(request.request_id, 1, -1.0, []),
        extras=[PromptLogprobs(1, [[2, 9]], [[-1.0, -0.5]], [2])],
    )
    assert outputs_after(out, [first]) == []
    state.unassign(MigrationReason.DIED)
    assert state.engine_request() == msgspec.structs.replace(request, attempt=2)
    second = of_prompt(request.request_id, 1, -2.0, [7])
    second = msgspec.structs.replace(second, attempt=2)
    (output,) = outputs_after(out, [second])
    table = output.prompt_logprobs
    assert table is not None
    unknown, *known = table
    assert unknown is None
    assert [list(position or {}) for position in known] == [[2, 9], [3, 8]]
    assert [(position or {})[i].logprob for position, i in zip(known, (2, 3), strict=True)] == [
        -1.0,
        -2.0,
    ]
    state.unassign(MigrationReason.DIED)
    again = state.engine_request()
    assert (again.sampler.prompt_logprobs, again.skip_prefix_cache) == (None, False)
    assert (again.output_token_ids, again.attempt) == ([7], 3)
    third = msgspec.structs.replace(of_prompt(request.request_id, 1, -3.0, [7]), attempt=3)
    (output,) = outputs_after(out, [third])
    assert output.prompt_logprobs == (None if kind == DELTA else table)


def test_a_collector_keeps_prompt_logprobs() -> None:
    params = SamplingParams(prompt_logprobs=1)
    out, request = processor(), core(params)
    collector = RequestOutputCollector(DELTA)
    out.add_request(request, params, kind=DELTA, queue=collector)
    out.process_outputs([of_prompt(request.request_id, 1, -1.0, [7])])
    out.process_outputs([EngineCoreOutput(request.request_id, [8], FinishReason.LENGTH)])
    output = collector.get_nowait()
    assert output is not None and output.outputs[0].token_ids == [7, 8]
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 3


def test_prompt_logprobs_do_not_count_as_a_token() -> None:
    """Prompt logprobs count neither as a token in the statistics nor as cached tokens."""
    clock, seen = [10.0], Recorder()
    out = processor(stats=seen, clock=lambda: clock[0])
    params = SamplingParams(prompt_logprobs=1)
    request = core(params)
    out.add_request(request, params)
    clock[0] = 11.0
    out.process_outputs([of_prompt(request.request_id, 1, -1.0, [])])
    assert not seen.all.time_to_first_token_s and not seen.all.num_prompt_tokens
    clock[0] = 14.0
    token = EngineCoreOutput(request.request_id, [5], FinishReason.LENGTH, num_cached_tokens=2)
    (output,) = outputs_after(out, [token])
    assert seen.all.time_to_first_token_s == [4.0]
    assert (seen.all.num_prompt_tokens, seen.all.num_output_tokens) == (3, 1)
    assert output.num_cached_tokens == 2


def test_an_error_shows_how_many_logits_are_nan() -> None:
    table = processor()
    state = table.add_request(core(SamplingParams()), SamplingParams())
    failed = EngineCoreOutput(
        state.request_id, [], FinishReason.ERROR, "not finite", num_nans_in_logits=7
    )
    (output,) = outputs_after(table, [failed])
    assert output.outputs[0].stop_reason == "not finite (7 logits are NaN)"
