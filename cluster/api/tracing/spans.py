"""Turns a finished request into spans.

    chat MODEL   |<- received ------------------------------- finished ->|
      attempt        |<- routed -- resubmitted ->|
      attempt                                      |<- routed - finished ->|

The first span is the child of the caller's span, and has the attributes of OpenTelemetry's
conventions for generative AI. Its latencies, which the conventions do not define, have the names
that vLLM gives them. Each attempt of each answer is a child of it, with its timeline as span
events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, StatusCode, Tracer, set_span_in_context

from swell.cluster.client.requests.journey import Journey, PlacedEvent
from swell.cluster.client.requests.request_history import RequestRecord
from swell.cluster.client.requests.stats import FinishedRequestStats
from swell.cluster.text.prompt.input_processor import ProcessedRequest
from swell.engine.wire import JourneyEventType

Value = str | bool | int | float | list[str]

_PROVIDER = "swell"
_ENDS_ATTEMPT = (JourneyEventType.RESUBMITTED, JourneyEventType.FINISHED)
_ERROR = "error"
"""The finish reason of a failure."""


def num_spans(record: RequestRecord) -> int:
    """Returns the number of spans of a sampled request."""
    return 1 + sum(
        event.kind is JourneyEventType.ROUTED
        for journey in record.journeys
        for event in journey.events
    )


def record_spans(
    tracer: Tracer, record: RequestRecord, processed: ProcessedRequest, parent: Context
) -> bool:
    """Records the span of the request, then those of its attempts. Returns False if the request is
    not sampled: nothing was recorded. `parent` has the caller's span, if any."""
    at_ns = _Clock(record)
    span = tracer.start_span(
        f"{record.operation} {record.model}",
        parent,
        SpanKind.SERVER,
        start_time=at_ns(record.received_s),
    )
    if not span.is_recording():
        return False
    span.set_attributes(_request_attributes(processed))
    span.set_attributes(_answer_attributes(record, processed))
    if _ERROR in _finish_reasons(record):
        span.set_attribute("error.type", "request_failed")
        span.set_status(StatusCode.ERROR)
    span.end(at_ns(record.received_s if record.ended_s is None else record.ended_s))
    inside = set_span_in_context(span, parent)
    for choice, journey in enumerate(record.journeys):
        for events in _attempts(journey):
            _record_attempt(tracer, choice, events, at_ns, inside)
    return True


class _Clock:
    """Converts the clock of the ingress to nanoseconds since 1970."""

    def __init__(self, record: RequestRecord) -> None:
        self._start_s = record.received_s
        self._start_ns = int(record.received_at * 1e9)

    def __call__(self, at_s: float) -> int:
        return self._start_ns + int(max(at_s - self._start_s, 0.0) * 1e9)


def _record_attempt(
    tracer: Tracer, choice: int, events: Sequence[PlacedEvent], at_ns: _Clock, parent: Context
) -> None:
    """`choice` is the index of the answer."""
    first, last = events[0], events[-1]
    attributes: dict[str, Value] = {
        "swell.choice": choice,
        "swell.engine.rank": first.rank or 0,
        "swell.attempt": first.attempt or 0,
    }
    ended = last.kind in _ENDS_ATTEMPT
    if ended and last.reason is not None:
        attributes[f"swell.{last.kind}.reason"] = last.reason
    span = tracer.start_span("attempt", parent, attributes=attributes, start_time=at_ns(first.at_s))
    for event in events[1:-1] if ended else events[1:]:
        span.add_event(str(event.kind), timestamp=at_ns(event.at_s))
    if last.reason == _ERROR:
        span.set_status(StatusCode.ERROR)
    span.end(at_ns(last.at_s))


def _request_attributes(processed: ProcessedRequest) -> dict[str, Value]:
    """Returns the attributes of the request. They never contain its text."""
    params = processed.params
    prompts = processed.requests[:: params.num_children]
    attributes: dict[str, Value] = {
        # The longest possible answer, set by the request or the server.
        "gen_ai.request.max_tokens": max(prompt.max_tokens for prompt in prompts),
        "gen_ai.request.temperature": float(params.temperature),
        "gen_ai.request.top_p": float(params.top_p),
        "gen_ai.request.stream": processed.stream,
        "gen_ai.usage.input_tokens": sum(len(prompt.prompt_token_ids) for prompt in prompts),
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


def _answer_attributes(record: RequestRecord, processed: ProcessedRequest) -> dict[str, Value]:
    finished = [journey.stats for journey in record.journeys if journey.stats is not None]
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.response.id": record.id,
        "swell.request_id": record.request_id,
        "gen_ai.usage.output_tokens": sum(stats.num_output_tokens for stats in finished),
        "gen_ai.response.finish_reasons": _finish_reasons(record),
    }
    attributes.update(_latencies(finished))
    if record.ended_s is not None:
        attributes["gen_ai.latency.e2e"] = max(record.ended_s - record.received_s, 0.0)
    first_s = min(_first_tokens_s(record), default=None)
    if first_s is not None:
        first_token_s = max(first_s - record.received_s, 0.0)
        attributes["gen_ai.latency.time_to_first_token"] = first_token_s
        if processed.stream:
            attributes["gen_ai.response.time_to_first_chunk"] = first_token_s
    return attributes


def _latencies(answers: Sequence[FinishedRequestStats]) -> dict[str, float]:
    """Returns the times of a request in seconds: queue and prefill of the answer with the first
    token, then the time until the last token of all answers. Times that are not known are left
    out."""
    # (end of the prefill, end of the queue, end of the decode) of each answer, since its arrival
    ends = [
        (one.queue_s + one.prefill_s, one.queue_s, one.queue_s + one.prefill_s + one.decode_s)
        for one in answers
        if one.queue_s is not None and one.prefill_s is not None and one.decode_s is not None
    ]
    if not ends:
        queued_s = [one.queue_s for one in answers if one.queue_s is not None]
        return {"gen_ai.latency.time_in_queue": queued_s[0]} if queued_s else {}
    first_s, queue_s, _ = min(ends)
    last_s = max(end_s for _, _, end_s in ends)
    return {
        "gen_ai.latency.time_in_queue": queue_s,
        "gen_ai.latency.time_in_model_prefill": first_s - queue_s,
        "gen_ai.latency.time_in_model_decode": last_s - first_s,
        "gen_ai.latency.time_in_model_inference": last_s - queue_s,
    }


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


def _finish_reasons(record: RequestRecord) -> list[str]:
    return [
        reason
        for journey in record.journeys
        if journey.finished and (reason := journey.events[-1].reason)
    ]


def _first_tokens_s(record: RequestRecord) -> Iterator[float]:
    return (
        event.at_s
        for journey in record.journeys
        for event in journey.events
        if event.kind is JourneyEventType.FIRST_TOKEN
    )
