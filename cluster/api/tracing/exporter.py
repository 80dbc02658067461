"""Exports finished requests as traces to a collector.

No request waits for the collector. Requests that it cannot accept now wait in a bounded queue. If
the queue is full, a request is dropped and counted.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat

from swell.cluster.api.tracing.spans import Span, TracedRequest, request_attributes, spans_of
from swell.cluster.api.tracing.trace_context import trace_context
from swell.cluster.client.requests.request_history import RequestRecord
from swell.cluster.text.prompt.input_processor import ProcessedRequest
from swell.cluster.text.prompt.offload import OffloadPool
from swell.configs.runtime.log import StructuredLogger

MAX_QUEUED_ANSWERS = 4096
"""The most answers in the queue: some megabytes."""
_BATCH_ANSWERS = 256
_DELAY_S = 0.5
"""How long a trace may wait for others of its batch."""
_FLUSH_S = 2.0
"""How long the shutdown of the ingress may wait for the last batches."""
_RETRY_S = (1.0, 2.0, 4.0, 8.0, 15.0)
"""The pauses between two attempts; the last one is repeated."""
SENT, DROPPED = "sent", "dropped"
Count = Callable[[str, int], None]


class TraceExporter:
    """Accepts finished requests. This base class does nothing: no collector is configured."""

    def export(
        self, record: RequestRecord, processed: ProcessedRequest, headers: Mapping[str, str]
    ) -> None:
        """Queues a finished request. `headers` are the trace headers of the caller's request."""

    async def close(self) -> None:
        """Sends what is queued, if that is possible soon."""


class OtlpExporter(TraceExporter):
    """Sends the requests to a collector in batches, from its own thread."""

    def __init__(self, endpoint: str, count: Count) -> None:
        """Takes the arguments of `make_exporter`."""
        # Protobuf is only imported if traces are exported.
        from swell.cluster.api.tracing import otlp

        self._otlp = otlp
        self._url = f"{endpoint.rstrip('/')}/v1/traces"
        self._count = count
        version = importlib.metadata.version("swell")
        self._resource = {"service.name": "swell", "service.version": version}
        self._pool = OffloadPool("traces", 1)
        self._queue: deque[TracedRequest] = deque()
        self._queued_answers = 0
        self._sending: asyncio.Task[None] | None = None
        self._log = StructuredLogger("cluster.ingress")

    def export(
        self, record: RequestRecord, processed: ProcessedRequest, headers: Mapping[str, str]
    ) -> None:
        parent = trace_context(headers)
        if parent is not None and not parent.sampled:
            return
        answers = len(record.journeys)
        if self._queued_answers + answers > MAX_QUEUED_ANSWERS:
            self._count(DROPPED, 1)
            return
        prompts = processed.requests[:: processed.params.num_children]
        attributes = request_attributes(
            processed.params,
            prompt_tokens=sum(len(one.prompt_token_ids) for one in prompts),
            max_tokens=max(one.max_tokens for one in prompts),
            stream=processed.stream,
        )
        self._queue.append(TracedRequest(record=record, parent=parent, attributes=attributes))
        self._queued_answers += answers
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all())

    async def close(self) -> None:
        if self._sending is not None:
            await asyncio.wait({self._sending}, timeout=_FLUSH_S)
            self._sending.cancel()
        self._pool.close()

    async def _send_all(self) -> None:
        """Sends batches until the queue is empty; a request that finishes later starts this
        again."""
        await asyncio.sleep(_DELAY_S)
        while self._queue:
            batch = self._take_batch()
            try:
                await self._send(batch)
                self._count(SENT, len(batch))
            except Exception as error:
                self._count(DROPPED, len(batch))
                self._log.warning("traces dropped", requests=len(batch), error=str(error))
            finally:
                self._queued_answers -= sum(len(one.record.journeys) for one in batch)

    def _take_batch(self) -> list[TracedRequest]:
        batch, answers = [], 0
        while self._queue and answers < _BATCH_ANSWERS:
            batch.append(self._queue.popleft())
            answers += len(batch[-1].record.journeys)
        return batch

    async def _send(self, batch: Sequence[TracedRequest]) -> None:
        """Sends one batch, and retries while the collector is unavailable. Raises
        CollectorRefused."""
        spans: list[Span] = []
        for wait_s in chain(_RETRY_S, repeat(_RETRY_S[-1])):
            try:
                return await self._pool.run(self._post, batch, spans)
            except self._otlp.CollectorAway as error:
                self._log.warning("traces wait", error=str(error), next_try_s=wait_s)
                await asyncio.sleep(wait_s)

    def _post(self, batch: Sequence[TracedRequest], spans: list[Span]) -> None:
        """Sends one batch, on the thread. The spans are made once, so that they keep their ids when
        they are sent again."""
        if not spans:
            spans += [span for traced in batch for span in spans_of(traced, os.urandom)]
        self._otlp.post_spans(self._url, self._resource, spans)


def make_exporter(endpoint: str | None, count: Count) -> TraceExporter:
    """Returns the exporter for `endpoint`, the base URL of a collector such as
    `http://collector:4318`; None: no traces are exported. `count` is called with SENT or DROPPED
    and a number of requests."""
    return TraceExporter() if endpoint is None else OtlpExporter(endpoint, count)
