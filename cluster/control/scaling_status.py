"""Status of the autoscaler, of engines that wait for room and of hosts that will be taken away, for
operators: parts of the body of `GET /admin/cluster`. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from swell.cluster.control.engines.engine_handle import EngineHandle
from swell.cluster.control.plan.autoscaler import Autoscaler
from swell.cluster.text.json_types import JsonObject
from swell.configs.schema import Config


def autoscaling(policy: Autoscaler, config: Config, now: float) -> JsonObject | None:
    """Returns the status of the autoscaler; None: it is off. Ages are in seconds."""
    if not config.autoscaling.enabled:
        return None
    load, found, last = policy.load, policy.recommendation, policy.decision
    return {
        "min_engines": config.cluster.min_engines,
        "max_engines": config.cluster.max_engines,
        "queue_s": None if load is None else round(load.queue_s, 3),
        "kv_usage": None if load is None else round(load.kv_usage, 4),
        "ttft_s": None if load is None or load.ttft_s is None else round(load.ttft_s, 4),
        "recommended": None if found is None else found.engines,
        "reason": "the load is not known yet" if found is None else found.reason,
        "shrink_after_s": policy.shrink_after_s,
        "last_decision": None
        if last is None
        else {
            "before": last.before,
            "engines": last.engines,
            "reason": last.reason,
            "age_s": round(now - last.at, 1),
        },
    }


def pending(
    starting: Mapping[int, EngineHandle], bundle: Mapping[str, float], count: int
) -> JsonObject | None:
    """Returns the engines that wait for room; None: there are none. `bundle`, `count`: what each
    engine reserves."""
    reasons = {
        rank: handle.waits_for_room
        for rank, handle in sorted(starting.items())
        if handle.waits_for_room is not None and not handle.leaving
    }
    if not reasons:
        return None
    return {
        "ranks": list(reasons),
        "reason": next(iter(reasons.values())),
        "bundles": [dict(bundle) for _ in range(count)],
    }


def draining_nodes(
    engines: Mapping[int, EngineHandle], draining: Mapping[str, float]
) -> list[JsonObject]:
    """Returns the nodes that Ray takes away, and the engines that are still on them."""
    nodes = {rank: handle.ready.node for rank, handle in sorted(engines.items()) if handle.ready}
    return [
        {
            "node": node,
            "left_s": None if math.isinf(left_s) else round(left_s, 1),
            "engines": [rank for rank, where in nodes.items() if where == node],
        }
        for node, left_s in sorted(draining.items())
    ]
