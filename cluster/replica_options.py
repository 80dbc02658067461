"""Options with which Ray Serve supervises our replicas.

The watchdog of a replica kills it if it hangs (`watchdog.py`). Serve detects dead replicas, and
gives up a replica after a long silence: its host may be cut off from the controller while clients
still reach it.
"""

from __future__ import annotations

import os
from typing import Any

from swell.configs.schema import ClusterConfig

_HEALTH_CHECKS = 3
"""Failed checks in a row after which Serve replaces a replica."""
_SHORTEST_PERIOD_S, _LONGEST_PERIOD_S = 3.0, 10.0
"""Bounds of the time between two checks."""
_UNHEARD_S = 90.0
"""How long Serve's controller waits without hearing from a replica before it kills it. TCP
retransmits within twice the duration of an outage, so an outage of 40 s kills none."""
_OUTLASTS = "RAY_grpc_keepalive_timeout_ms"
_OUTLASTS_MS = "120000"
"""How long a replica keeps a connection whose peer does not answer. With Ray's default of 20 s it
would close during an outage, and Serve would take the following reset for the death of the
replica."""


def replica_options(cluster: ClusterConfig, shutdown_s: float) -> dict[str, Any]:
    """Returns the options of a deployment whose replicas may take `shutdown_s` to stop."""
    check_s = max(_SHORTEST_PERIOD_S, cluster.stall_timeout_s / (2 * _HEALTH_CHECKS))
    of_actor: dict[str, Any] = {"num_cpus": 0}
    if _OUTLASTS not in os.environ:  # else replicas inherit it from Ray's processes
        of_actor["runtime_env"] = {"env_vars": {_OUTLASTS: _OUTLASTS_MS}}
    return {
        "ray_actor_options": of_actor,
        "graceful_shutdown_timeout_s": shutdown_s,
        "health_check_timeout_s": _UNHEARD_S / _HEALTH_CHECKS,
        "health_check_period_s": min(check_s, _LONGEST_PERIOD_S),
    }
