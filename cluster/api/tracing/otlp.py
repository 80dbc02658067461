"""Exports finished requests with the OpenTelemetry SDK, by OTLP over HTTP.

The spans of a request are made when the request has finished, on a separate thread: those of a
request with many answers take milliseconds. The SDK's thread sends them in batches, and sends a
batch again while the collector is away. Spans wait in a bounded queue; a request whose spans do not
fit is dropped and counted.

The tracer is not the global one of the process, so that Swell's spans and those of other libraries
do not mix.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from swell.cluster.api.tracing.exporter import DROPPED, SENT, Count, TraceExporter
from swell.cluster.api.tracing.spans import num_spans, record_spans
from swell.cluster.client.requests.request_history import RequestRecord
from swell.cluster.text.prompt.input_processor import ProcessedRequest
from swell.configs.runtime.log import StructuredLogger

MAX_QUEUED_SPANS = 4096
"""The most spans that wait or are being sent: some 16 MB."""
_BATCH_SPANS = 512
_DELAY_S = 0.5
"""How long a span may wait for others of its batch."""
_TIMEOUT_S = 40.0
"""How long one batch is sent again: enough for the SDK's six attempts, which take 31 s while the
collector refuses connections."""
_FLUSH_S = 2.0
"""How long the shutdown of the ingress may wait for the last batches."""
_POLL_S = 0.02


class OtlpExporter(TraceExporter):
    """Makes the spans of finished requests and gives them to the SDK."""

    def __init__(self, endpoint: str, count: Count) -> None:
        """Takes the arguments of `make_exporter`."""
        self._count = count
        self._log = StructuredLogger("cluster.ingress")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="traces")
        self._num_accepted = 0  # spans, as below
        self._num_unrecorded = 0
        self._exporter = _CountingExporter(f"{endpoint.rstrip('/')}/v1/traces", count)
        processor = BatchSpanProcessor(
            self._exporter,
            # Above the limit that `export` keeps: the SDK drops spans without counting requests.
            max_queue_size=MAX_QUEUED_SPANS + _BATCH_SPANS,
            schedule_delay_millis=_DELAY_S * 1000,
            max_export_batch_size=_BATCH_SPANS,
        )
        version = importlib.metadata.version("swell")
        resource = Resource({"service.name": "swell", "service.version": version})
        self._provider = TracerProvider(
            resource=resource.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("swell", version)
        self._propagator = TraceContextTextMapPropagator()

    @property
    def num_queued(self) -> int:
        """Number of spans that wait or are being sent."""
        return self._num_accepted - self._num_unrecorded - self._exporter.num_exported

    def export(
        self, record: RequestRecord, processed: ProcessedRequest, headers: Mapping[str, str]
    ) -> None:
        spans = num_spans(record)
        if self.num_queued + spans > MAX_QUEUED_SPANS:
            self._count(DROPPED, 1)
            return
        self._num_accepted += spans
        self._thread.submit(self._record, record, processed, headers)

    def _record(
        self, record: RequestRecord, processed: ProcessedRequest, headers: Mapping[str, str]
    ) -> None:
        """Makes the spans, on the thread."""
        recorded = False
        try:
            parent = self._propagator.extract(headers)
            recorded = record_spans(self._tracer, record, processed, parent)
        except Exception as error:  # a defect: nobody waits for this call
            self._log.exception("no spans for a request", error, request=record.request_id)
        if not recorded:
            self._num_unrecorded += num_spans(record)

    async def close(self) -> None:
        """Sends what is queued, within `_FLUSH_S`."""
        # The SDK would wait half a minute, and a thread of asyncio would delay the process's exit.
        stopping = Thread(target=self._stop, name="stop traces", daemon=True)
        stopping.start()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + _FLUSH_S
        while stopping.is_alive() and loop.time() < end_s:
            await asyncio.sleep(_POLL_S)
        if stopping.is_alive():
            self._exporter.shutdown()  # ends the attempts to send a batch again

    def _stop(self) -> None:
        self._thread.shutdown()
        self._provider.shutdown()


class _CountingExporter(SpanExporter):
    """Counts the requests whose spans the collector has accepted or not."""

    def __init__(self, url: str, count: Count) -> None:
        self._exporter = OTLPSpanExporter(url, timeout=_TIMEOUT_S)
        self._count = count
        self.num_exported = 0
        """Number of spans that were sent or dropped."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result: SpanExportResult = self._exporter.export(spans)
        self.num_exported += len(spans)
        requests = sum(span.kind is SpanKind.SERVER for span in spans)
        self._count(SENT if result is SpanExportResult.SUCCESS else DROPPED, requests)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]
