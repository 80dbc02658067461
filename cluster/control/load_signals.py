"""How loaded a cluster is, from what its engines and ingresses report anyway: pure.

The queue time is an estimate, from what waits now and how fast requests start. The one that is
measured (`swell_request_queue_time_seconds`) is known when a request has ended: it says that more
engines were needed, often after they are not.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from swell.cluster.client.admission import WINDOW_S, StartRate
from swell.cluster.client.metrics import FIRST_TOKEN_BOUNDS_S
from swell.coordinator.wire import ClusterView

_QUANTILE = 0.9
_MIN_REQUESTS = 10
"""Fewer first tokens within the window say little about nine of ten."""


@dataclass(frozen=True)
class Load:
    """The load of a cluster, over the last seconds where it needs a time."""

    engines: int
    """That serve and stay."""
    running: int = 0
    waiting: int = 0
    queue_s: float = 0.0
    """How long a new request would wait for a slot."""
    drained_s: float = math.inf
    """When nothing would wait any more, if what waits falls as in the last seconds."""
    kv_usage: float = 0.0
    """Share of the KV blocks in use, on average over the engines."""
    ttft_s: float | None = None
    """Time to first token of nine of ten requests; None: there were too few."""


class LoadSeries:
    """Observations of one cluster, with their times."""

    def __init__(self) -> None:
        self._starts = StartRate()
        self._waiting: deque[tuple[float, int]] = deque()
        """Times with how many waited, within the window."""
        self._first_tokens: deque[tuple[float, Sequence[float]]] = deque()
        """Times with the histogram until then. The first is as old as the window, or the only one.
        """

    def observe(
        self,
        view: ClusterView,
        first_tokens: Sequence[float],
        staying: Collection[int],
        now: float,
    ) -> Load | None:
        """`first_tokens`: as `Membership` has them. `staying`: ranks of engines that serve, and do
        not leave. None: one of them has not reported, or there is none."""
        self._starts.observe(view, now)
        ttft_s = self._ttft_s(first_tokens[:-1], now)
        reports = [report for report in view.reports if report.rank in staying]
        if not reports or len(reports) < len(staying):
            return None
        waiting = sum(report.waiting for report in view.reports)
        return Load(
            len(reports),
            sum(report.running for report in view.reports),
            waiting,
            self._queue_s(waiting, now),
            self._drained_s(waiting, now),
            sum(report.kv_usage for report in reports) / len(reports),
            ttft_s,
        )

    def _queue_s(self, waiting: int, now: float) -> float:
        """Where nothing has started within the window, each waits as long for the next."""
        rate = self._starts.of(now).requests
        return waiting / rate if rate else waiting * WINDOW_S

    def _drained_s(self, waiting: int, now: float) -> float:
        series = self._waiting
        series.append((now, waiting))
        while series[0][0] < now - WINDOW_S:
            series.popleft()
        fell, span_s = series[0][1] - waiting, now - series[0][0]
        return waiting * span_s / fell if fell > 0 else math.inf

    def _ttft_s(self, buckets: Sequence[float], now: float) -> float | None:
        series = self._first_tokens
        if series and any(new < old for new, old in zip(buckets, series[-1][1], strict=False)):
            series.clear()  # the coordinator was restarted, and does not know all ingresses yet
        if buckets:
            series.append((now, list(buckets)))
        while len(series) > 1 and series[1][0] <= now - WINDOW_S:
            series.popleft()
        if not series:
            return None
        since = series[0][1]
        fresh = [new - old for new, old in zip(series[-1][1], since, strict=True)]
        return quantile(FIRST_TOKEN_BOUNDS_S, fresh)


def quantile(bounds: Sequence[float], buckets: Sequence[float]) -> float | None:
    """The time within which nine of ten values lie: interpolated in its bucket, as Prometheus does.
    `buckets`: counts, one more than bounds. None: there are too few."""
    total = sum(buckets)
    if total < _MIN_REQUESTS:
        return None
    rank = _QUANTILE * total
    index = next(i for i, count in enumerate(accumulate(buckets)) if count >= rank)
    if index == len(bounds):
        return bounds[-1]
    lower = bounds[index - 1] if index else 0.0
    below = sum(buckets[:index])
    return lower + (bounds[index] - lower) * (rank - below) / buckets[index]
