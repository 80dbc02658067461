"""Load of a cluster, computed from what its engines and ingresses report anyway. Pure.

The queue time is an estimate from the number of waiting requests and the rate at which requests
start. The measured queue time (`swell_request_queue_time_seconds`) is known only when a request has
finished: it says that more engines were needed, often after that is over.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from swell.cluster.client.metrics import FIRST_TOKEN_BOUNDS_S
from swell.cluster.client.routing.admission import WINDOW_S, StartRate
from swell.coordinator.wire import ClusterView

_QUANTILE = 0.9
_MIN_REQUESTS = 10
"""Minimum number of first tokens in the window: fewer say little about the 90th percentile."""


@dataclass(frozen=True)
class Load:
    """The load of a cluster; rates and times cover the last seconds."""

    engines: int
    """The number of engines that serve and do not leave."""
    running: int = 0
    waiting: int = 0
    queue_s: float = 0.0
    """Estimated time that a new request waits for a slot."""
    drained_s: float = math.inf
    """Seconds until no request waits, if their number keeps falling as in the last seconds."""
    kv_usage: float = 0.0
    """Average share of the KV blocks in use."""
    ttft_s: float | None = None
    """90th percentile of the time to first token; None: there were too few requests."""


class LoadSeries:
    """Observations of one cluster, with their times."""

    def __init__(self) -> None:
        self._starts = StartRate()
        self._waiting: deque[tuple[float, int]] = deque()
        """Times and numbers of waiting requests, within the window."""
        self._first_tokens: deque[tuple[float, Sequence[float]]] = deque()
        """Times and cumulative histograms. The first one is as old as the window, or the only
        one."""

    def observe(
        self,
        view: ClusterView,
        first_tokens: Sequence[float],
        staying: Collection[int],
        now: float,
    ) -> Load | None:
        """Records an observation and returns the load; None: an engine of `staying` has not
        reported, or there is none. `first_tokens`: as in `Membership`. `staying`: ranks of engines
        that serve and do not leave."""
        self._starts.observe(view, now)
        ttft_s = self._ttft_s(first_tokens[:-1], now)
        reports = [report for report in view.reports.engines if report.rank in staying]
        if not reports or len(reports) < len(staying):
            return None
        waiting = sum(report.waiting for report in view.reports.engines)
        return Load(
            len(reports),
            sum(report.running for report in view.reports.engines),
            waiting,
            self._queue_s(waiting, now),
            self._drained_s(waiting, now),
            sum(report.kv_usage for report in reports) / len(reports),
            ttft_s,
        )

    def _queue_s(self, waiting: int, now: float) -> float:
        """Estimates the queue time. If no request has started within the window, each waiting one
        adds a whole window."""
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
            series.clear()  # the coordinator was restarted and does not know all ingresses yet
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
    """Returns the 90th percentile, interpolated within its bucket as Prometheus does; None: there
    are too few values. `buckets`: counts, one more than `bounds`."""
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
