"""The Prometheus metrics of the text floor."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from swell.cluster.stats import IterationStats

FIRST_TOKEN_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
TOKEN_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 10.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS_S = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0,
)  # fmt: skip
TOKEN_COUNT_BUCKETS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))


class Histogram:
    """What prometheus_client's would show, for one thread: theirs locks and searches one bucket
    after the other, which is too much for each token."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        """`bounds`: the largest value of each bucket, ascending; one more has what is above."""
        self._name = name
        self._text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Each bucket with those below it, as a registry wants it."""
        bounds = map(floatToGoString, (*self._bounds, float("inf")))
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class PrometheusStats:
    """A `StatsSink` with a registry of its own, so that many may live in one process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"swell_{name}", text, buckets)
            registry.register(made)
            return made

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"swell_{name}", text, labels, registry=registry)

        self._first_token = histogram(
            "time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_BUCKETS_S
        )
        self._inter_token = histogram(
            "inter_token_latency_seconds", "Between two tokens of an answer.", TOKEN_BUCKETS_S
        )
        self._e2e = histogram(
            "e2e_request_latency_seconds", "Arrival to last token.", REQUEST_BUCKETS_S
        )
        self._queue = histogram(
            "request_queue_time_seconds", "Arrival to first schedule.", REQUEST_BUCKETS_S
        )
        self._prefill = histogram(
            "request_prefill_time_seconds", "First schedule to first token.", REQUEST_BUCKETS_S
        )
        self._decode = histogram(
            "request_decode_time_seconds", "First token to last token.", REQUEST_BUCKETS_S
        )
        self._request_prompt = histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", TOKEN_COUNT_BUCKETS
        )
        self._request_generation = histogram(
            "request_generation_tokens", "Generated tokens of a request.", TOKEN_COUNT_BUCKETS
        )
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens processed.")
        self._generation_tokens = counter("generation_tokens", "Tokens generated.")
        self._success = counter(
            "request_success", "Requests that ended, by reason.", ("finished_reason",)
        )
        self._resubmitted = counter(
            "resubmitted_requests", "Requests that moved to another engine."
        )
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(reason)

    def record(self, stats: IterationStats) -> None:
        if stats.num_output_tokens:
            self._prompt_tokens.inc(stats.num_prompt_tokens)
            self._generation_tokens.inc(stats.num_output_tokens)
        for seconds in stats.time_to_first_token_s:
            self._first_token.observe(seconds)
        for seconds in stats.inter_token_latency_s:
            self._inter_token.observe(seconds)
        for request in stats.finished:
            self._success.labels(request.finish_reason).inc()
            self._e2e.observe(request.e2e_s)
            self._queue.observe(request.queue_s)
            self._prefill.observe(request.prefill_s)
            self._decode.observe(request.decode_s)
            self._request_prompt.observe(request.num_prompt_tokens)
            self._request_generation.observe(request.num_output_tokens)

    def resubmitted(self) -> None:
        """A request moved to another engine."""
        self._resubmitted.inc()

    def render(self) -> bytes:
        """The text of `/metrics`."""
        return generate_latest(self.registry)
