"""The Prometheus metrics of an ingress."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from swell.cluster.client.requests.stats import IterationStats, StatsSink
from swell.cluster.text.schema.known_fields import IGNORED_FIELDS
from swell.coordinator.metrics_aggregator import add, highest
from swell.coordinator.wire import Counts
from swell.engine.wire import FinishReason

FIRST_TOKEN_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
TOKEN_BOUNDS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 10.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BOUNDS_S = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0,
)  # fmt: skip
COUNT_BOUNDS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))

RESUMABLE_RESULTS = ("begun", "joined", "recomputed", "aborted")

_OF_REQUEST = {
    "e2e_s": (
        "e2e_request_latency_seconds",
        "Seconds from the arrival of a request to its last token.",
        REQUEST_BOUNDS_S,
    ),
    "queue_s": (
        "request_queue_time_seconds",
        "Seconds from the arrival of a request until it is first scheduled.",
        REQUEST_BOUNDS_S,
    ),
    "prefill_s": (
        "request_prefill_time_seconds",
        "Seconds from the first scheduling of a request to its first token.",
        REQUEST_BOUNDS_S,
    ),
    "decode_s": (
        "request_decode_time_seconds",
        "Seconds from the first to the last token of a request.",
        REQUEST_BOUNDS_S,
    ),
    "num_prompt_tokens": (
        "request_prompt_tokens",
        "Number of prompt tokens of a request.",
        COUNT_BOUNDS,
    ),
    "num_output_tokens": (
        "request_generation_tokens",
        "Number of generated tokens of a request.",
        COUNT_BOUNDS,
    ),
}
"""The histogram of each number in `FinishedRequestStats`."""


class Histogram:
    """A histogram like prometheus_client's, for use by one thread: theirs locks, and searches the
    buckets one after the other, which is too slow for each token."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        """`bounds` are the upper bounds of the buckets, ascending; one more bucket has larger
        values."""
        self.name = f"swell_{name}"
        self._text = text
        self._bounds = bounds
        self.numbers = [0.0] * (len(bounds) + 2)
        """The number of values in each bucket, then the sum of all values."""

    def observe(self, *values: float) -> None:
        numbers, bounds = self.numbers, self._bounds
        for value in values:
            numbers[bisect_left(bounds, value)] += 1
            numbers[-1] += value

    def to_family(self, numbers: Sequence[float]) -> Metric:
        """Exports the histogram. Each bucket includes those below it, as a registry requires."""
        bounds = map(floatToGoString, (*self._bounds, float("inf")))
        buckets = list(zip(bounds, accumulate(numbers[:-1]), strict=True))
        return HistogramMetricFamily(self.name, self._text, buckets=buckets, sum_value=numbers[-1])


class Counter:
    """A counter with one number, or with one for each value of a label; the values are fixed."""

    def __init__(self, name: str, text: str, label: str = "", values: Sequence[str] = ()) -> None:
        self.name = f"swell_{name}"
        self._text = text
        self._label = label
        self._places = {value: place for place, value in enumerate(values or [""])}
        self.numbers = [0.0] * len(self._places)

    def inc(self, amount: float = 1.0, value: str = "") -> None:
        self.numbers[self._places[value]] += amount

    def to_family(self, numbers: Sequence[float]) -> Metric:
        labels = [self._label] if self._label else []
        family = CounterMetricFamily(self.name, self._text, labels=labels)
        for value, place in self._places.items():
            family.add_metric([value] if self._label else [], numbers[place])
        return family


class PrometheusStats(StatsSink, Collector):
    """A `StatsSink` with its own registry, so that several can exist in one process.

    It exports the sum of its own counters and those of all other ingresses, as last received. Until
    it has received these it exports nothing: a counter that shrinks would look like a restart, and
    its whole value like an increase.
    """

    def __init__(self) -> None:
        self._first_token = Histogram(
            "time_to_first_token_seconds",
            "Seconds from the arrival of a request to its first token.",
            FIRST_TOKEN_BOUNDS_S,
        )
        self._inter_token = Histogram(
            "inter_token_latency_seconds",
            "Seconds between two tokens of an answer.",
            TOKEN_BOUNDS_S,
        )
        self._of_request = {field: Histogram(*row) for field, row in _OF_REQUEST.items()}
        self._prompt_tokens = Counter("prompt_tokens", "Number of prompt tokens.")
        self._generation_tokens = Counter("generation_tokens", "Number of generated tokens.")
        self._success = Counter(
            "request_success",
            "Requests that finished, by reason.",
            "finished_reason",
            [str(reason) for reason in FinishReason],
        )
        self._resubmitted = Counter(
            "resubmitted_requests", "Times that a request was moved to another engine."
        )
        self._numerics_changes = Counter(
            "numerics_changes", "Times that a request moved to an engine of another numerics class."
        )
        self._refused = Counter(
            "refused_requests",
            "Requests that were refused because too many already waited.",
            "reason",
            ["too_many_waiting_requests", "too_many_waiting_tokens"],
        )
        self._ignored = Counter(
            "ignored_fields",
            "Unknown fields in messages, calls and tools of requests that were ignored.",
            "field",
            IGNORED_FIELDS,
        )
        self._traces = Counter(
            "traces",
            "Requests whose spans were sent to the collector, or were dropped.",
            "result",
            ["sent", "dropped"],
        )
        self._resumable = Counter(
            "resumable_requests",
            "Requests with an Idempotency-Key, and answers that were aborted because no client "
            "came back.",
            "result",
            RESUMABLE_RESULTS,
        )
        own = [metric for metric in vars(self).values() if isinstance(metric, Histogram | Counter)]
        self._metrics = [*own, *self._of_request.values()]
        self._other_counts: Counts | None = None
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def record(self, stats: IterationStats) -> None:
        if stats.num_prompt_tokens:
            self._prompt_tokens.inc(stats.num_prompt_tokens)
        if stats.num_output_tokens:
            self._generation_tokens.inc(stats.num_output_tokens)
        if stats.time_to_first_token_s:
            self._first_token.observe(*stats.time_to_first_token_s)
        if stats.inter_token_latency_s:
            self._inter_token.observe(*stats.inter_token_latency_s)
        for request in stats.finished:
            self._success.inc(value=request.finish_reason)
            for field, histogram in self._of_request.items():
                value = getattr(request, field)
                if value is not None:
                    histogram.observe(value)

    def resubmitted(self) -> None:
        """Counts a request that moved to another engine."""
        self._resubmitted.inc()

    def numerics_changed(self) -> None:
        """Counts an answer that continues on an engine of another numerics class."""
        self._numerics_changes.inc()

    def refused(self, reason: str) -> None:
        """Counts a request that was not admitted."""
        self._refused.inc(value=reason)

    def ignored(self, fields: Mapping[str, int]) -> None:
        """Counts ignored unknown fields in messages, calls and tools, by label."""
        for field, count in fields.items():
            self._ignored.inc(count, field)

    def traced(self, result: str, requests: int) -> None:
        """Counts requests whose spans were exported or dropped."""
        self._traces.inc(requests, result)

    def resumable(self, result: str) -> None:
        """Counts one of RESUMABLE_RESULTS."""
        self._resumable.inc(value=result)

    def counts(self) -> Counts:
        """Returns the counters of this ingress."""
        return {metric.name: metric.numbers for metric in self._metrics}

    def totals(self) -> Counts:
        """Returns the sums over all ingresses; empty until those of the others are known."""
        if self._other_counts is None:
            return {}
        own = {name: [*numbers] for name, numbers in self.counts().items()}
        return add(own, self._other_counts)

    def set_other_counts(self, counts: Counts) -> None:
        """Sets the sum over all other ingresses. A restarted coordinator has forgotten ingresses
        that are gone: each sum stays at its highest value until the others have counted as much."""
        self._other_counts = highest(self._other_counts or {}, counts)

    def collect(self) -> Iterator[Metric]:
        total = self.totals()
        for metric in self._metrics if total else ():
            yield metric.to_family(total[metric.name])

    def render(self) -> bytes:
        """Returns the text of `/metrics`."""
        return generate_latest(self.registry)
