"""Decides whether one more request may wait. Pure: the time is an argument.

All ingresses share all engines, so they share one limit on waiting requests. The waiting requests
are those that engines report, plus those that this ingress has submitted and that are not in a
report yet. Other ingresses do not know the second number. To stay within the limit together, each
ingress may fill only its share of the room that the reports leave:

    refused if   own >= (limit - reported) / ingresses        for requests, and for their tokens

With equal reports, all ingresses together admit at most `limit + ingresses - 1` requests. Reports
reach an ingress about `2 * cluster.load_report_s` after they were true, and different ingresses at
different times. Requests that one ingress admits by a newer report than another has seen come on
top: at most a quarter of the limit for two ingresses that are one report apart. A request is
admitted as a whole, with all its prompts and answers: the last admitted request may exceed the
limit by that much.

While the coordinator is down, no reports arrive, and the last report would refuse every request
until it is back. An ingress then counts the requests that it has sent and that have no token yet,
against its share of the limit.

An admitted request is never refused later, no matter where it must continue.

A refused client gets a `Retry-After` time: when the queue will have room, at the rate of the last
seconds, and after all clients that were refused before it. Otherwise all clients would retry at the
same time, and all except one would be refused again.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from swell.coordinator.wire import ClusterView, EngineLoad, EngineReport

WINDOW_S = 10.0
"""Length of the window over which the rate is measured."""
MIN_SPAN_S = 1.0
"""Minimum time over which the rate is computed; a shorter one gives no useful rate."""
MAX_RETRY_S = 60
"""The longest retry time: new engines may join at any time."""
DEFAULT_RETRY_S = 5
"""The retry time if no request was started within the window: the burst has only begun, or there is
no progress."""


class TooManyWaiting(RuntimeError):
    """The request may not wait; the HTTP server answers with status 429."""

    def __init__(self, message: str, code: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class Backlog(NamedTuple):
    """Waiting requests and their tokens, as one ingress knows them."""

    requests: int = 0
    """Waiting requests, as engines report them."""
    tokens: int = 0
    own_requests: int = 0
    """Requests of this ingress that are not in a report yet."""
    own_tokens: int = 0


class Rate(NamedTuple):
    """Requests and tokens that the engines start per second."""

    requests: float
    tokens: float


class StartRate:
    """Counts requests and tokens that engines started within the last seconds."""

    def __init__(self) -> None:
        self._engines: dict[tuple[int, int], tuple[int, int]] = {}
        """Started requests and tokens in the last report of each engine, by rank and
        incarnation."""
        self._requests = self._tokens = 0
        self._samples: deque[tuple[float, int, int]] = deque()
        """Times with the sums up to then. The first one is as old as the window, or the only
        one."""

    def observe(self, view: ClusterView, now: float) -> None:
        """Adds what engines started since their last report. The first report of an engine adds
        nothing."""
        engines: dict[tuple[int, int], tuple[int, int]] = {}
        for report in view.reports.engines:
            key = (report.rank, report.incarnation)
            started = (report.started_requests, report.started_tokens)
            before = self._engines.get(key, started)
            self._requests += max(0, started[0] - before[0])
            self._tokens += max(0, started[1] - before[1])
            engines[key] = started
        self._engines = engines
        self._samples.append((now, self._requests, self._tokens))
        self._forget(now)

    def of(self, now: float) -> Rate:
        self._forget(now)
        if not self._samples:
            return Rate(0.0, 0.0)
        since, requests, tokens = self._samples[0]
        span_s = max(now - since, MIN_SPAN_S)
        return Rate((self._requests - requests) / span_s, (self._tokens - tokens) / span_s)

    def _forget(self, now: float) -> None:
        samples = self._samples
        while len(samples) > 1 and samples[1][0] <= now - WINDOW_S:
            samples.popleft()


class Admission:
    """The admission control of one ingress."""

    def __init__(self, max_requests: int, max_tokens: int, ingresses: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._ingresses = ingresses
        self._rate = StartRate()
        self._retries_until = 0.0
        """The retry time of the last refused request."""

    def observe(self, view: ClusterView, now: float) -> None:
        self._rate.observe(view, now)

    def check(self, backlog: Backlog, now: float) -> None:
        """Raises TooManyWaiting if one more request may not wait."""
        over_requests = self._over(self._max_requests, backlog.requests, backlog.own_requests)
        over_tokens = self._over(self._max_tokens, backlog.tokens, backlog.own_tokens)
        if not over_requests and not over_tokens:
            return
        retry_s = self._retry_s(over_requests, over_tokens, now)
        if over_requests:
            name, limit, code = "requests", self._max_requests, "too_many_waiting_requests"
            count = backlog.requests + backlog.own_requests
        else:
            name, limit, code = "tokens", self._max_tokens, "too_many_waiting_tokens"
            count = backlog.tokens + backlog.own_tokens
        raise TooManyWaiting(
            f"{count} {name} already wait, and the limit is serve.max_waiting_{name}={limit}; try "
            f"again in {retry_s} s",
            code,
            retry_s,
        )

    def _over(self, limit: int, reported: int, own: int) -> int:
        """Returns how many must start before another request may wait; 0 if it may wait now."""
        share = -(-(limit - reported) // self._ingresses)
        return 0 if own < share else max(1, reported + own - limit + 1)

    def _retry_s(self, over_requests: int, over_tokens: int, now: float) -> int:
        rate = self._rate.of(now)
        if not rate.requests or (over_tokens and not rate.tokens):
            return DEFAULT_RETRY_S
        room_s = over_requests / rate.requests
        if over_tokens:
            room_s = max(room_s, over_tokens / rate.tokens)
        place_s = self._ingresses / rate.requests
        back_at = max(now + room_s, self._retries_until + place_s)
        self._retries_until = min(back_at, now + MAX_RETRY_S)
        return min(max(1, math.ceil(round(back_at - now, 3))), MAX_RETRY_S)


def waiting_here(
    load: EngineReport | EngineLoad,
    unreported_requests: int,
    unreported_tokens: int,
    max_rows: int,
) -> Backlog:
    """Returns the backlog of one engine: what it reports, plus what was sent since. If no request
    waits there, new ones first fill free rows."""
    free_rows = 0 if load.waiting else max(0, max_rows - load.running)
    return Backlog(
        load.waiting,
        load.waiting_tokens,
        max(0, unreported_requests - free_rows),
        unreported_tokens,
    )
