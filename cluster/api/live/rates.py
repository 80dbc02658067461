"""Rates and quantiles of the requests between two samples of the metrics. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from swell.cluster.api.admin.live_protocol import LiveRates
from swell.cluster.client.metrics import FIRST_TOKEN_BOUNDS_S, TOKEN_BOUNDS_S
from swell.coordinator.wire import FIRST_TOKENS, Counts, EngineReport

_INTER_TOKEN = "swell_inter_token_latency_seconds"
_PROMPT, _GENERATED = "swell_prompt_tokens", "swell_generation_tokens"
_FINISHED = "swell_request_success"


def rates_between(
    before: Counts, after: Counts, at: float, elapsed_s: float, reports: Sequence[EngineReport]
) -> LiveRates:
    """`before` and `after` are counts that only increase; `elapsed_s` passed between them."""

    def increase(name: str) -> list[float]:
        new = after.get(name, [])
        old = before.get(name, new)  # unknown: the whole count would look like an increase
        # ingresses of two releases may count in other buckets
        return [max(0.0, one - other) for one, other in zip(new, old, strict=False)]

    first, between = increase(FIRST_TOKENS), increase(_INTER_TOKEN)
    return LiveRates(
        at=at,
        prompt_tokens_per_s=round(sum(increase(_PROMPT)) / elapsed_s, 2),
        tokens_per_s=round(sum(increase(_GENERATED)) / elapsed_s, 2),
        requests_per_s=round(sum(increase(_FINISHED)) / elapsed_s, 2),
        running=sum(report.running for report in reports),
        waiting=sum(report.waiting for report in reports),
        ttft_p50_s=quantile(first[:-1], FIRST_TOKEN_BOUNDS_S, 0.5),
        ttft_p99_s=quantile(first[:-1], FIRST_TOKEN_BOUNDS_S, 0.99),
        itl_p50_s=quantile(between[:-1], TOKEN_BOUNDS_S, 0.5),
        itl_p99_s=quantile(between[:-1], TOKEN_BOUNDS_S, 0.99),
    )


def quantile(buckets: Sequence[float], bounds: Sequence[float], share: float) -> float | None:
    """Returns the value below which `share` of the values of a histogram lie, interpolated in its
    bucket. Returns None if there are no values. A value above all bounds counts as the last bound.
    """
    left = sum(buckets) * share
    if left <= 0:
        return None
    low = 0.0
    for number, high in zip(buckets, bounds, strict=False):
        if number and number >= left:
            return round(low + (high - low) * left / number, 6)
        left -= number
        low = high
    return low
