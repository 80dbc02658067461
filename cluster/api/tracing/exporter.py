"""Exports finished requests as traces to a collector. No request waits for the collector."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec

from swell.cluster.client.requests.request_history import RequestRecord
from swell.cluster.text.prompt.input_processor import ProcessedRequest

SENT, DROPPED = "sent", "dropped"
Count = Callable[[str, int], None]
INSTALL = "pip install 'swell[tracing]'"


class TraceExporter:
    """Accepts finished requests. This base class does nothing: no collector is configured."""

    def export(
        self, record: RequestRecord, processed: ProcessedRequest, headers: Mapping[str, str]
    ) -> None:
        """Queues a finished request. `headers` are the trace headers of the caller's request."""

    async def close(self) -> None:
        """Sends what is queued, if that is possible soon."""


def make_exporter(endpoint: str | None, count: Count) -> TraceExporter:
    """Returns the exporter for `endpoint`, the base URL of a collector such as
    `http://collector:4318`; None: no traces are exported. `count` is called with SENT or DROPPED
    and a number of requests, on any thread."""
    if endpoint is None:
        return TraceExporter()
    # OpenTelemetry is an optional dependency.
    from swell.cluster.api.tracing.otlp import OtlpExporter

    return OtlpExporter(endpoint, count)


def is_installed() -> bool:
    """Returns whether OpenTelemetry's exporter is installed."""
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # of a parent package
        return False
