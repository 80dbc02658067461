"""Requests as spans: children of the caller's trace, complete, and never waited for."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from swell.cluster.api.tracing import exporter, otlp
from swell.cluster.api.tracing.spans import TracedRequest, request_attributes, spans_of
from swell.cluster.api.tracing.trace_context import trace_context
from swell.cluster.app import with_collector
from swell.cluster.client.requests.journey import Journey
from swell.cluster.client.requests.request_history import RequestRecord
from swell.cluster.text.params.sampling_params import SamplingParams
from swell.configs.schema import ConfigError, load
from swell.coordinator.transport.ports import free_port
from swell.engine.wire import JourneyEventType as Kind
from tests.cluster.api.tracing.otlp_collector import start_collector
from tests.cluster.fake_cluster import FakeCluster, Stream, body, until
from tests.cluster.text import tokenizers_for_tests

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CALLER = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
SERVER, INTERNAL = 2, 1
"""Span kinds of OTLP."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises the POST timeout, so that a slow collector does not get a batch twice."""
    monkeypatch.setattr(otlp, "_POST_TIMEOUT_S", 60.0)


# -------------------------------------------------------------------------------- the caller's span


HEX = st.text("0123456789abcdef", min_size=30, max_size=34)
PARENTS = st.one_of(
    st.text(max_size=60),
    st.builds("{}-{}-{}-{}".format, st.sampled_from(["00", "01", "ff", "0"]), HEX, HEX, HEX),
    st.from_regex(r"\A(00|01|ff)-[0-9a-f]{32}-[0-9a-f]{16}-0[01](-x)?\Z"),
    st.sampled_from([f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01"]),
)


@given(PARENTS)
def test_a_parent_is_read_as_opentelemetry_reads_it(text: str) -> None:
    found = trace_context({"traceparent": text})
    context = TraceContextTextMapPropagator().extract({"traceparent": text})
    spans = [span for span in context.values() if hasattr(span, "get_span_context")]
    if not spans:
        assert found is None
        return
    expected = spans[0].get_span_context()  # type: ignore[attr-defined]
    assert found is not None
    assert int.from_bytes(found.trace_id) == expected.trace_id
    assert int.from_bytes(found.span_id) == expected.span_id
    assert found.sampled == expected.trace_flags.sampled


# -------------------------------------------------------------------------------- a request's spans


def counted() -> Any:
    numbers = itertools.count(1)
    return lambda count: next(numbers).to_bytes(count)


def traced(*journeys: Journey, ended_s: float = 9.0) -> TracedRequest:
    record = RequestRecord("cmpl-a", "a", "chat", "m", 1.0, 100.0, [*journeys], ended_s)
    params = SamplingParams(temperature=0.5, top_k=4, max_tokens=7, seed=3)
    attributes = request_attributes(params, prompt_tokens=5, max_tokens=7, stream=True)
    return TracedRequest(record=record, parent=trace_context(CALLER), attributes=attributes)


def moved(reason: str) -> Journey:
    journey = Journey()
    journey.add(Kind.QUEUED, 1.5)
    journey.add(Kind.ROUTED, 2.0, 0, 1)
    journey.add(Kind.FIRST_TOKEN, 3.0, 0, 1)
    journey.add(Kind.RESUBMITTED, 4.0, 0, 1, "the engine was lost")
    journey.add(Kind.QUEUED, 4.0)
    journey.add(Kind.ROUTED, 6.0, 1, 2)
    journey.add(Kind.PREEMPTED, 7.0, 1, 2)
    journey.finish(8.0, 1, 2, reason, 12)
    return journey


def test_a_request_has_a_span_and_each_attempt_one_below_it() -> None:
    root, first, second = spans_of(traced(moved("stop")), counted())
    assert (root.trace_id.hex(), root.parent_id.hex(), root.state) == (TRACE, SPAN, "vendor=1")
    assert (root.name, root.is_server, root.failed) == ("chat m", True, False)
    assert (root.start_ns, root.end_ns) == (100 * 10**9, 108 * 10**9)
    assert root.attributes["gen_ai.usage.output_tokens"] == 12
    assert root.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert root.attributes["gen_ai.response.time_to_first_chunk"] == 2.0
    for span, rank in ((first, 0), (second, 1)):
        assert (span.trace_id, span.parent_id) == (root.trace_id, root.span_id)
        assert (span.attributes["swell.engine.rank"], span.attributes["swell.attempt"]) == (
            rank,
            rank + 1,
        )
    assert (first.start_ns, first.end_ns) == (101 * 10**9, 103 * 10**9)
    assert first.attributes["swell.resubmitted.reason"] == "the engine was lost"
    assert [event.name for event in first.events] == ["first_token"]
    assert [event.name for event in second.events] == ["preempted"]
    assert len({root.span_id, first.span_id, second.span_id}) == 3


def test_a_failure_is_an_error_of_the_request_and_of_its_last_attempt() -> None:
    root, first, second = spans_of(traced(moved("error")), counted())
    assert (root.failed, first.failed, second.failed) == (True, False, True)
    assert root.attributes["error.type"]


def test_attributes_have_the_names_of_the_conventions() -> None:
    known = [value for name, value in vars(gen_ai_attributes).items() if name[:4] == "GEN_"]
    params = SamplingParams(n=2, top_k=3, seed=1, frequency_penalty=0.5, presence_penalty=0.5)
    attributes = request_attributes(params, prompt_tokens=5, max_tokens=7, stream=True)
    (root, *_) = spans_of(traced(moved("stop")), counted())
    names = {name for name in {*attributes, *root.attributes} if name.startswith("gen_ai.")}
    assert len(names) > 15
    assert names <= set(known)


# ------------------------------------------------------------------------- export to a collector


async def finished_traces(cluster: FakeCluster) -> dict[str, float]:
    lines = (await cluster.client.get("/metrics")).text.splitlines()
    rows = [line.split() for line in lines if line.startswith("swell_traces_total{")]
    return {name.split('"')[1]: float(value) for name, value in rows}


@pytest.mark.slow
def test_a_collector_gets_a_moved_request_below_the_callers_span(folder: Path) -> None:
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


@pytest.mark.slow
def test_what_the_caller_does_not_sample_is_not_exported(folder: Path) -> None:
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


@pytest.mark.slow
def test_a_collector_that_is_away_fails_no_request_and_drops_are_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "MAX_QUEUED_ANSWERS", 4)

    async def run() -> None:
        nobody = f"http://127.0.0.1:{free_port('127.0.0.1')}"
        settings: dict[str, object] = {"serve.otlp_endpoint": nobody}
        async with FakeCluster(folder, **settings).serving() as cluster:
            await cluster.join(0)
            for _ in range(9):
                answer = await cluster.client.post("/v1/completions", json=body([1], 2))
                assert answer.status_code == 200
            traces = cluster.ingress.services.traces
            assert isinstance(traces, exporter.OtlpExporter)
            await until(lambda: traces._queued_answers == 4)
            assert await finished_traces(cluster) == {"sent": 0.0, "dropped": 5.0}

    asyncio.run(run())


@pytest.mark.slow
def test_a_batch_that_is_refused_is_dropped_and_the_next_one_sent(folder: Path) -> None:
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


def test_without_an_endpoint_nothing_is_loaded_or_kept() -> None:
    assert type(exporter.make_exporter(None, lambda *_: None)) is exporter.TraceExporter


def test_the_endpoint_is_that_of_the_configuration_or_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = {"model": {"path": "."}}
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert with_collector(load(model)) == load(model)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://there:4318")
    assert with_collector(load(model)).serve.otlp_endpoint == "http://there:4318"
    here = load(model, {"serve.otlp_endpoint": "https://here/otlp"})
    assert with_collector(here) is here
    for wrong in ("collector:4317", "grpc://collector", "http://", "http://a b"):
        with pytest.raises(ConfigError, match=r"serve\.otlp_endpoint="):
            load(model, {"serve.otlp_endpoint": wrong})
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", wrong)
        with pytest.raises(ConfigError, match=r"serve\.otlp_endpoint="):
            with_collector(load(model))
