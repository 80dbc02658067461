"""Turns a finished request into spans. Pure.

    chat MODEL   |<- received ------------------------------- finished ->|
      attempt        |<- routed -- resubmitted ->|
      attempt                                      |<- routed - finished ->|

The first span is the child of the caller's span, and has the attributes of OpenTelemetry's
conventions for generative AI. Each attempt of each answer is a child of it, with its timeline as
span events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec

from swell.cluster.api.tracing.trace_context import TraceContext
from swell.cluster.client.requests.journey import Journey, PlacedEvent
from swell.cluster.client.requests.request_history import RequestRecord
from swell.cluster.text.params.sampling_params import SamplingParams
from swell.engine.wire import JourneyEventType

Value = str | bool | int | float | list[str]
RandomBytes = Callable[[int], bytes]

_PROVIDER = "swell"
_ENDS_ATTEMPT = (JourneyEventType.RESUBMITTED, JourneyEventType.FINISHED)
_ERROR = "error"
"""The finish reason of a failure."""


class SpanEvent(msgspec.Struct, frozen=True):
    name: str
    at_ns: int
    attributes: Mapping[str, Value] = {}


class Span(msgspec.Struct, kw_only=True):
    """One span. Times are in nanoseconds since 1970."""

    name: str
    trace_id: bytes
    span_id: bytes
    parent_id: bytes = b""
    """Empty: this is a root span."""
    state: str = ""
    is_server: bool = False
    """Whether the span answers a call of another process."""
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value]
    events: list[SpanEvent] = []
    failed: bool = False


class TracedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A finished request with its parameters."""

    record: RequestRecord
    parent: TraceContext | None
    """The caller's span."""
    attributes: Mapping[str, Value]
    """The attributes `gen_ai.request.*`, and the number of prompt tokens."""


def request_attributes(
    params: SamplingParams, *, prompt_tokens: int, max_tokens: int, stream: bool
) -> dict[str, Value]:
    """Returns the attributes that are known before the answer. They never contain text of the
    request. `max_tokens` is the longest possible answer, set by the request or the server."""
    attributes: dict[str, Value] = {
        "gen_ai.request.max_tokens": max_tokens,
        "gen_ai.request.temperature": float(params.temperature),
        "gen_ai.request.top_p": float(params.top_p),
        "gen_ai.request.stream": stream,
        "gen_ai.usage.input_tokens": prompt_tokens,
    }
    optional = {
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
    }
    attributes.update({name: value for name, value in optional.items() if value is not None})
    return attributes


def spans_of(traced: TracedRequest, random_bytes: RandomBytes) -> Iterator[Span]:
    """Yields the span of the request, then those of its attempts."""
    record, parent = traced.record, traced.parent
    at_ns = _Clock(record)
    reasons = [reason for journey in record.journeys if (reason := _finish_reason(journey))]
    failed = _ERROR in reasons
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.response.id": record.id,
        "swell.request_id": record.request_id,
        **traced.attributes,
        "gen_ai.usage.output_tokens": sum(journey.num_tokens for journey in record.journeys),
        "gen_ai.response.finish_reasons": reasons,
    }
    first_s = min((s for journey in record.journeys for s in _first_token_s(journey)), default=None)
    if first_s is not None and traced.attributes.get("gen_ai.request.stream"):
        first_chunk_s = max(first_s - record.received_s, 0.0)
        attributes["gen_ai.response.time_to_first_chunk"] = first_chunk_s
    if failed:
        attributes["error.type"] = "request_failed"
    root = Span(
        name=f"{record.operation} {record.model}",
        trace_id=random_bytes(16) if parent is None else parent.trace_id,
        span_id=random_bytes(8),
        parent_id=b"" if parent is None else parent.span_id,
        state="" if parent is None else parent.state,
        is_server=True,
        start_ns=at_ns(record.received_s),
        end_ns=at_ns(record.received_s if record.ended_s is None else record.ended_s),
        attributes=attributes,
        failed=failed,
    )
    yield root
    for index, journey in enumerate(record.journeys):
        for events in _attempts(journey):
            yield _attempt_span(root, index, events, at_ns, random_bytes)


class _Clock:
    """Converts the clock of the ingress to nanoseconds since 1970."""

    def __init__(self, record: RequestRecord) -> None:
        self._start_s = record.received_s
        self._start_ns = int(record.received_at * 1e9)

    def __call__(self, at_s: float) -> int:
        return self._start_ns + int(max(at_s - self._start_s, 0.0) * 1e9)


def _attempts(journey: Journey) -> Iterator[list[PlacedEvent]]:
    """Yields the events of each attempt, from `routed` on. An attempt may end with the request, or
    without an end event if the journey had too many events."""
    events: list[PlacedEvent] = []
    for event in journey.events:
        if event.kind is JourneyEventType.ROUTED:
            if events:
                yield events
            events = [event]
        elif events and events[-1].kind is not JourneyEventType.RESUBMITTED:
            events.append(event)
    if events:
        yield events


def _attempt_span(
    root: Span, index: int, events: list[PlacedEvent], at_ns: _Clock, random_bytes: RandomBytes
) -> Span:
    first, last = events[0], events[-1]
    attributes: dict[str, Value] = {
        "swell.choice": index,
        "swell.engine.rank": first.rank or 0,
        "swell.attempt": first.attempt or 0,
    }
    ended = last.kind in _ENDS_ATTEMPT
    if ended and last.reason is not None:
        attributes[f"swell.{last.kind}.reason"] = last.reason
    return Span(
        name="attempt",
        trace_id=root.trace_id,
        span_id=random_bytes(8),
        parent_id=root.span_id,
        state=root.state,
        start_ns=at_ns(first.at_s),
        end_ns=at_ns(last.at_s),
        attributes=attributes,
        events=[
            SpanEvent(str(event.kind), at_ns(event.at_s))
            for event in (events[1:-1] if ended else events[1:])
        ],
        failed=last.reason == _ERROR,
    )


def _finish_reason(journey: Journey) -> str | None:
    return journey.events[-1].reason if journey.finished else None


def _first_token_s(journey: Journey) -> Iterator[float]:
    return (e.at_s for e in journey.events if e.kind is JourneyEventType.FIRST_TOKEN)
