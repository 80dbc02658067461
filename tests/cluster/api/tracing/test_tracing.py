"""Requests as spans: children of the caller's trace, complete, and never waited for."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from swell.cluster import app
from swell.cluster.api.tracing import exporter
from swell.cluster.api.tracing.spans import num_spans, record_spans
from swell.cluster.client.requests.journey import Journey
from swell.cluster.client.requests.request_history import RequestRecord
from swell.cluster.text.params.sampling_params import SamplingParams
from swell.cluster.text.prompt.input_processor import ProcessedRequest
from swell.cluster.text.tokens.detokenizer import TextStart
from swell.configs.schema import ConfigError, load
from swell.engine.wire import JourneyEventType as Kind
from tests.cluster.api.tracing.otlp_collector import needs_exporter, start_collector
from tests.cluster.fake_cluster import FakeCluster, Stream, body, until
from tests.cluster.text import tokenizers_for_tests
from tests.pages.blocks import blocks
from tests.support.core_requests import core_request, finished_stats

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CALLER = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
PAGE = "docs/guide/timings.md"
SERVER, INTERNAL = 2, 1
"""Span kinds of OTLP."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def otlp(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the exporter, with a longer timeout: a slow collector gets no batch twice."""
    from swell.cluster.api.tracing import otlp

    monkeypatch.setattr(otlp, "_TIMEOUT_S", 300.0)
    return otlp


# -------------------------------------------------------------------------------- a request's spans


def processed_request(**fields: Any) -> ProcessedRequest:
    """Returns a request with two prompts, of two and of three tokens."""
    params = SamplingParams(**fields)
    prompts = ([1, 2], 7), ([3, 4, 5], 6)
    return ProcessedRequest(
        requests=[
            core_request(params, child, prompt_token_ids=ids, max_tokens=max_tokens)
            for ids, max_tokens in prompts
            for child in range(params.num_children)
        ],
        prompt_texts=[None, None],
        params=params,
        text_start=TextStart.NEW_TEXT,
        make_parser=lambda: None,  # type: ignore[arg-type, return-value]
        stream=True,
    )


def spans_of(
    *journeys: Journey, headers: dict[str, str] = CALLER, **fields: Any
) -> list[ReadableSpan]:
    memory, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    record = RequestRecord("cmpl-a", "a", "chat", "m", 1.0, 100.0, [*journeys], 9.0)
    parent = TraceContextTextMapPropagator().extract(headers)
    tracer, processed = provider.get_tracer("test"), processed_request(**fields)
    recorded = record_spans(tracer, record, processed, parent)
    spans = memory.get_finished_spans()
    assert len(spans) == (num_spans(record) if recorded else 0)
    return [*spans]


LATENCY = "gen_ai.latency."


def latencies(span: ReadableSpan) -> dict[str, Any]:
    found = (span.attributes or {}).items()
    return {name[len(LATENCY) :]: value for name, value in found if name.startswith(LATENCY)}


def moved(reason: str) -> Journey:
    journey = Journey()
    journey.add(Kind.QUEUED, 1.5)
    journey.add(Kind.ROUTED, 2.0, 0, 1)
    journey.add(Kind.FIRST_TOKEN, 3.0, 0, 1)
    journey.add(Kind.RESUBMITTED, 4.0, 0, 1, "the engine was lost")
    journey.add(Kind.QUEUED, 4.0)
    journey.add(Kind.ROUTED, 6.0, 1, 2)
    journey.add(Kind.PREEMPTED, 7.0, 1, 2)
    stats = finished_stats(reason, 12, queue_s=1.0, prefill_s=1.0, decode_s=4.5)
    journey.finish(8.0, 1, 2, stats)
    return journey


def test_a_request_has_a_span_and_each_attempt_one_below_it() -> None:
    root, first, second = spans_of(moved("stop"), temperature=0.5, seed=3)
    assert root.context and root.parent and root.attributes
    assert root.context.trace_id == root.parent.trace_id == int(TRACE, 16)
    assert root.parent.span_id == int(SPAN, 16)
    assert root.context.trace_state.to_header() == "vendor=1"
    assert (root.name, root.kind, root.status.is_ok) == ("chat m", SpanKind.SERVER, True)
    assert (root.start_time, root.end_time) == (100 * 10**9, 108 * 10**9)
    assert root.attributes["gen_ai.request.temperature"] == 0.5
    assert root.attributes["gen_ai.request.seed"] == 3
    assert root.attributes["gen_ai.request.max_tokens"] == 7
    assert root.attributes["gen_ai.usage.input_tokens"] == 5
    assert root.attributes["gen_ai.usage.output_tokens"] == 12
    assert root.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert root.attributes["gen_ai.response.time_to_first_chunk"] == 2.0
    assert latencies(root) == {
        "time_in_queue": 1.0,
        "time_to_first_token": 2.0,
        "time_in_model_prefill": 1.0,
        "time_in_model_decode": 4.5,
        "time_in_model_inference": 5.5,
        "e2e": 8.0,
    }
    for span, rank in ((first, 0), (second, 1)):
        assert span.attributes and span.parent and span.context
        assert span.kind is SpanKind.INTERNAL
        assert (span.context.trace_id, span.parent) == (root.context.trace_id, root.context)
        assert (span.attributes["swell.engine.rank"], span.attributes["swell.attempt"]) == (
            rank,
            rank + 1,
        )
    assert (first.start_time, first.end_time) == (101 * 10**9, 103 * 10**9)
    assert first.attributes and second.attributes
    assert first.attributes["swell.resubmitted.reason"] == "the engine was lost"
    assert second.attributes["swell.finished.reason"] == "stop"
    assert [(event.name, event.timestamp) for event in first.events] == [
        ("first_token", 102 * 10**9)
    ]
    assert [event.name for event in second.events] == ["preempted"]


def test_the_times_of_several_answers_reach_from_the_first_token_to_the_last() -> None:
    """The second answer has the first token, and the first answer has the last token. The third
    answer fails before its first token."""
    answers = [Journey(), Journey(), Journey()]
    for journey in answers:
        journey.add(Kind.ROUTED, 1.5, 0, 1)
    answers[1].add(Kind.FIRST_TOKEN, 2.5, 0, 1)
    answers[0].add(Kind.FIRST_TOKEN, 3.0, 0, 1)
    answers[0].finish(8.0, 0, 1, finished_stats(queue_s=1.5, prefill_s=0.5, decode_s=5.0))
    answers[1].finish(5.0, 0, 1, finished_stats(queue_s=0.75, prefill_s=0.75, decode_s=2.5))
    answers[2].finish(8.5, 0, 1, finished_stats("error"))
    root, *_ = spans_of(*answers, n=3)
    assert latencies(root) == {
        "time_in_queue": 0.75,
        "time_to_first_token": 1.5,
        "time_in_model_prefill": 0.75,
        "time_in_model_decode": 5.5,
        "time_in_model_inference": 6.25,
        "e2e": 8.0,
    }


def test_a_request_without_a_token_has_only_the_times_that_are_known() -> None:
    waited, lost = Journey(), Journey()
    waited.finish(9.0, None, None, finished_stats("abort", queue_s=7.5))
    lost.add(Kind.ROUTED, 1.5, 0, 1)
    lost.finish(9.0, 0, 1, finished_stats("error"))
    assert latencies(spans_of(waited)[0]) == {"time_in_queue": 7.5, "e2e": 8.0}
    assert latencies(spans_of(lost)[0]) == {"e2e": 8.0}
    assert latencies(spans_of()[0]) == {"e2e": 8.0}


def test_a_failure_is_an_error_of_the_request_and_of_its_last_attempt() -> None:
    root, first, second = spans_of(moved("error"))
    assert [span.status.is_ok for span in (root, first, second)] == [False, True, False]
    assert root.attributes and root.attributes["error.type"]


@pytest.mark.parametrize(
    "parent",
    [
        {},
        {"traceparent": ""},
        {"traceparent": f"ff-{TRACE}-{SPAN}-01"},
        {"traceparent": f"00-{'0' * 32}-{SPAN}-01", "tracestate": "vendor=1"},
        {"traceparent": f"00-{TRACE}-{SPAN}-01-more"},
    ],
)
def test_a_request_without_a_valid_parent_begins_a_trace(parent: dict[str, str]) -> None:
    root, *_ = spans_of(moved("stop"), headers=parent)
    assert root.context and root.parent is None
    assert root.context.trace_id not in (0, int(TRACE, 16))


def test_a_request_that_its_caller_does_not_sample_has_no_spans() -> None:
    assert spans_of(moved("stop"), headers={"traceparent": f"00-{TRACE}-{SPAN}-00"}) == []


def test_attributes_have_the_names_of_the_conventions() -> None:
    known = [value for name, value in vars(gen_ai_attributes).items() if name[:4] == "GEN_"]
    root, *_ = spans_of(
        moved("stop"),
        n=2,
        temperature=0.5,
        top_k=3,
        seed=1,
        frequency_penalty=0.5,
        presence_penalty=0.5,
    )
    names = {name for name in root.attributes or {} if name.startswith("gen_ai.")}
    assert len(names) > 15
    assert {name for name in names - set(known) if not name.startswith(LATENCY)} == set()


# ------------------------------------------------------------------------- export to a collector


async def finished_traces(cluster: FakeCluster) -> dict[str, float]:
    lines = (await cluster.client.get("/metrics")).text.splitlines()
    rows = [line.split() for line in lines if line.startswith("swell_traces_total{")]
    return {name.split('"')[1]: float(value) for name, value in rows}


@needs_exporter
@pytest.mark.slow
def test_the_span_of_a_migrated_request_is_a_child_of_the_callers_span(
    folder: Path, otlp: Any
) -> None:
    """The collector is a separate process that rejects the first batch."""
    with start_collector(503) as collector:

        async def run() -> None:
            settings: dict[str, object] = {"serve.otlp_endpoint": collector.endpoint}
            async with FakeCluster(folder, **settings).serving() as cluster:
                cluster.client.headers.update(CALLER)
                first = await cluster.join(0, steps=3)
                stream = Stream(cluster, body([1, 2], 20, temperature=0.5))
                await stream.has(3)
                await cluster.join(1)
                await cluster.kill(first)
                await stream.done
                root, *attempts = await asyncio.to_thread(collector.take, 3)
                await until_sent(cluster)
                check_moved(root, attempts, stream)

        asyncio.run(run())


async def until_sent(cluster: FakeCluster) -> None:
    async with asyncio.timeout(30):
        while await finished_traces(cluster) != {"sent": 1.0, "dropped": 0.0}:
            await asyncio.sleep(0.01)


def check_moved(root: dict[str, Any], attempts: list[dict[str, Any]], stream: Stream) -> None:
    assert (root["trace_id"], root["parent_id"], root["state"]) == (TRACE, SPAN, "vendor=1")
    assert (root["kind"], root["status"]) == (SERVER, 0)
    assert root["resource"]["service.name"] == "swell"
    known = root["attributes"]
    assert known["gen_ai.operation.name"] == "text_completion"
    assert known["gen_ai.request.model"] == known["gen_ai.response.model"] == "fake"
    assert known["gen_ai.usage.input_tokens"] == 2
    assert known["gen_ai.usage.output_tokens"] == 20
    assert known["gen_ai.request.max_tokens"] == 20
    assert (known["gen_ai.request.temperature"], known["gen_ai.request.top_p"]) == (0.5, 1.0)
    assert known["gen_ai.response.finish_reasons"] == ["length"]
    assert known["swell.request_id"] == stream.headers["x-request-id"]
    queue, prefill, decode, inference, e2e, first_token = (
        known[LATENCY + name]
        for name in (
            "time_in_queue",
            "time_in_model_prefill",
            "time_in_model_decode",
            "time_in_model_inference",
            "e2e",
            "time_to_first_token",
        )
    )
    assert min(queue, prefill) >= 0 and decode > 0
    assert inference == pytest.approx(prefill + decode)
    assert queue + prefill <= first_token + 1e-6
    assert queue + inference <= e2e + 1e-6
    assert e2e == pytest.approx((root["end_ns"] - root["start_ns"]) / 1e9, abs=1e-6)
    assert known["gen_ai.response.time_to_first_chunk"] == first_token
    ranks = [span["attributes"]["swell.engine.rank"] for span in attempts]
    assert ranks == [0, 1]
    for span in attempts:
        assert (span["trace_id"], span["parent_id"]) == (TRACE, root["span_id"])
        assert span["kind"] == INTERNAL
        names = [name for name, _ in span["events"]]
        assert names == ["queued", "scheduled", "first_token"]
        times = [span["start_ns"], *(at_ns for _, at_ns in span["events"]), span["end_ns"]]
        assert times == sorted(times)
        assert root["start_ns"] <= times[0]
        assert times[-1] <= root["end_ns"]


@needs_exporter
@pytest.mark.slow
def test_spans_that_the_caller_does_not_sample_are_not_exported(folder: Path, otlp: Any) -> None:
    with start_collector() as collector:

        async def run() -> None:
            settings: dict[str, object] = {"serve.otlp_endpoint": collector.endpoint}
            async with FakeCluster(folder, **settings).serving() as cluster:
                await cluster.join(0)
                quiet = {"traceparent": f"00-{TRACE}-{SPAN}-00"}
                payload = body([1], 2)
                await cluster.client.post("/v1/completions", json=payload, headers=quiet)
                await cluster.client.post("/v1/completions", json=payload)
                root, _ = await asyncio.to_thread(collector.take, 2)
                assert root["parent_id"] == ""
                assert root["trace_id"] != TRACE
                await until_sent(cluster)
                assert collector.is_empty()

        asyncio.run(run())


@needs_exporter
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "exported"),
    [("parentbased_traceidratio", [SPAN]), ("traceidratio", []), ("always_on", ["", SPAN, SPAN])],
)
def test_the_sampler_of_the_environment_decides(
    folder: Path, otlp: Any, monkeypatch: pytest.MonkeyPatch, sampler: str, exported: list[str]
) -> None:
    """A ratio of 0 drops all traces that begin here. A sampler that is based on the parent does
    what the caller has decided. Responses are not streamed, and have a time to first token."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    quiet = {"traceparent": f"00-{TRACE}-{SPAN}-00"}

    async def run() -> None:
        settings: dict[str, object] = {"serve.otlp_endpoint": collector.endpoint}
        async with FakeCluster(folder, **settings).serving() as cluster:
            await cluster.join(0)
            for headers in ({}, CALLER, quiet):
                payload = body([1], 2)
                await cluster.client.post("/v1/completions", json=payload, headers=headers)
            traces = cluster.ingress.services.traces
            assert isinstance(traces, otlp.OtlpExporter)
            await until(lambda: traces.num_queued == 0)

    with start_collector() as collector:
        asyncio.run(run())
        spans = collector.take(2 * len(exported))
        assert collector.is_empty()
    roots = [span for span in spans if span["kind"] == SERVER]
    assert [root["parent_id"] for root in roots] == exported
    for root in roots:
        assert root["attributes"][LATENCY + "time_to_first_token"] > 0
        assert "gen_ai.response.time_to_first_chunk" not in root["attributes"]
        (block,) = (b for b in blocks() if (b.page, b.language) == (PAGE, "json"))
        example = json.loads(block.code)
        assert {name: type(value) for name, value in example.items()} == {
            name: type(value) for name, value in root["attributes"].items()
        }, "the page shows the attributes of this span"


@needs_exporter
@pytest.mark.slow
def test_a_collector_that_hangs_fails_no_request_and_drops_are_counted(
    folder: Path, otlp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shutdown gives up too: it returns before the batch does, which has an hour."""
    monkeypatch.setattr(otlp, "MAX_QUEUED_SPANS", 8)
    monkeypatch.setattr(otlp, "_TIMEOUT_S", 3600.0)

    async def run(endpoint: str) -> None:
        settings: dict[str, object] = {"serve.otlp_endpoint": endpoint}
        async with FakeCluster(folder, **settings).serving() as cluster:
            await cluster.join(0)
            for _ in range(9):
                answer = await cluster.client.post("/v1/completions", json=body([1], 2))
                assert answer.status_code == 200
            traces = cluster.ingress.services.traces
            assert isinstance(traces, otlp.OtlpExporter)
            await until(lambda: traces.num_queued == 8)
            assert await finished_traces(cluster) == {"sent": 0.0, "dropped": 5.0}
        assert traces.num_queued == 8

    with socket.create_server(("127.0.0.1", 0)) as hanging:  # it accepts nothing
        asyncio.run(run(f"http://127.0.0.1:{hanging.getsockname()[1]}"))


@needs_exporter
@pytest.mark.slow
def test_a_batch_that_is_refused_is_dropped_and_the_next_one_sent(folder: Path, otlp: Any) -> None:
    with start_collector(400) as collector:

        async def run() -> None:
            settings: dict[str, object] = {"serve.otlp_endpoint": collector.endpoint}
            async with FakeCluster(folder, **settings).serving() as cluster:
                await cluster.join(0)
                payload = body([1], 2)
                await cluster.client.post("/v1/completions", json=payload)
                while (await finished_traces(cluster))["dropped"] != 1:
                    await asyncio.sleep(0.01)
                answer = await cluster.client.post("/v1/completions", json=payload)
                root, _ = await asyncio.to_thread(collector.take, 2)
                assert root["attributes"]["gen_ai.response.id"] == answer.json()["id"]

        asyncio.run(run())


def test_without_an_endpoint_nothing_is_kept() -> None:
    assert type(exporter.make_exporter(None, lambda *_: None)) is exporter.TraceExporter


def test_the_endpoint_comes_from_the_configuration_or_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = {"model": {"path": "."}}
    monkeypatch.setattr(exporter, "is_installed", lambda: True)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert app.with_collector(load(model)) == load(model)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://there:4318")
    assert app.with_collector(load(model)).serve.otlp_endpoint == "http://there:4318"
    here = load(model, {"serve.otlp_endpoint": "https://here/otlp"})
    assert app.with_collector(here) is here
    for wrong in ("collector:4317", "grpc://collector", "http://", "http://a b"):
        with pytest.raises(ConfigError, match=r"serve\.otlp_endpoint="):
            load(model, {"serve.otlp_endpoint": wrong})
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", wrong)
        with pytest.raises(ConfigError, match=r"serve\.otlp_endpoint="):
            app.with_collector(load(model))


def test_without_the_exporter_a_configured_endpoint_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The environment may be that of other programs, so an endpoint there is only reported."""
    monkeypatch.setattr(exporter, "is_installed", lambda: False)
    model = {"model": {"path": "."}}
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://there:4318")
    assert app.with_collector(load(model)).serve.otlp_endpoint is None
    assert exporter.INSTALL in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"serve\.otlp_endpoint needs .* pip install"):
        app.with_collector(load(model, {"serve.otlp_endpoint": "http://here:4318"}))


def test_a_missing_package_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(exporter, "find_spec", missing)
    assert not exporter.is_installed()
