"""Sends spans to a collector with OTLP over HTTP, as protobuf. Ray installs the message classes."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1 import trace_pb2

from swell.cluster.api.tracing.spans import Span, Value

_POST_TIMEOUT_S = 5.0
_HTTP_PROTOBUF = {"content-type": "application/x-protobuf", "user-agent": "swell"}
_RETRYABLE = (429, 502, 503, 504)
"""Statuses after which the same batch may be sent again, as OTLP defines."""


class CollectorAway(RuntimeError):
    """The collector may accept the same batch later."""


class CollectorRefused(RuntimeError):
    """The collector will never accept this batch."""


def post_spans(url: str, resource: Mapping[str, Value], spans: Iterable[Span]) -> None:
    """Sends one batch. Raises CollectorAway or CollectorRefused."""
    body = encode_spans(resource, spans)
    request = urllib.request.Request(url, body, _HTTP_PROTOBUF, method="POST")
    try:
        urllib.request.urlopen(request, timeout=_POST_TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        with error:
            kind = CollectorAway if error.code in _RETRYABLE else CollectorRefused
        raise kind(f"{url} answered {error.code}") from None
    except Exception as error:  # errors of sockets, of TLS, of the collector's HTTP
        raise CollectorAway(f"{url}: {error}") from None


def encode_spans(resource: Mapping[str, Value], spans: Iterable[Span]) -> bytes:
    scope = trace_pb2.ScopeSpans(spans=map(_encode_span, spans))
    scope.scope.name = "swell"
    of_resource = trace_pb2.ResourceSpans(
        resource=Resource(attributes=_key_values(resource)), scope_spans=[scope]
    )
    encoded: bytes = ExportTraceServiceRequest(resource_spans=[of_resource]).SerializeToString()
    return encoded


def _encode_span(span: Span) -> trace_pb2.Span:
    kind = trace_pb2.Span.SPAN_KIND_SERVER if span.is_server else trace_pb2.Span.SPAN_KIND_INTERNAL
    encoded = trace_pb2.Span(
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_span_id=span.parent_id,
        trace_state=span.state,
        name=span.name,
        kind=kind,
        start_time_unix_nano=span.start_ns,
        end_time_unix_nano=span.end_ns,
        attributes=_key_values(span.attributes),
        events=[
            trace_pb2.Span.Event(
                name=event.name,
                time_unix_nano=event.at_ns,
                attributes=_key_values(event.attributes),
            )
            for event in span.events
        ],
    )
    if span.failed:
        encoded.status.code = trace_pb2.Status.STATUS_CODE_ERROR
    return encoded


def _key_values(attributes: Mapping[str, Value]) -> list[KeyValue]:
    return [KeyValue(key=name, value=_any_value(value)) for name, value in attributes.items()]


def _any_value(value: Value) -> AnyValue:
    match value:
        case bool():
            return AnyValue(bool_value=value)
        case str():
            return AnyValue(string_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case list():
            values = [AnyValue(string_value=one) for one in value]
            return AnyValue(array_value=ArrayValue(values=values))
