"""How Ray Serve supervises a replica of ours.

A replica that stands still is ended by its watchdog (`watchdog.py`). Serve finds out that one has
ended, and gives up one that it has not heard for long: its host may be cut off from the controller
while clients reach it.
"""

from __future__ import annotations

import os
from typing import Any

from swell.configs.schema import ClusterConfig

_HEALTH_CHECKS = 3
"""As many in a row must fail before Serve replaces a replica."""
_SHORTEST_PERIOD_S, _LONGEST_PERIOD_S = 3.0, 10.0
"""Between two checks."""
_UNHEARD_S = 90.0
"""How long Serve's controller hears nothing of a replica before it ends it. After an outage TCP
sends again within twice its duration: so one of 40 s ends nobody."""
_OUTLASTS = "RAY_grpc_keepalive_timeout_ms"
_OUTLASTS_MS = "120000"
"""How long a replica keeps a connection whose other end does not answer. With Ray's own 20 s it
ends within an outage, and Serve takes the reset that follows for the end of the replica."""


def replica_options(cluster: ClusterConfig, shutdown_s: float) -> dict[str, Any]:
    """Options of a deployment whose replicas may take `shutdown_s` to end."""
    check_s = max(_SHORTEST_PERIOD_S, cluster.stall_timeout_s / (2 * _HEALTH_CHECKS))
    of_actor: dict[str, Any] = {"num_cpus": 0}
    if _OUTLASTS not in os.environ:  # of Ray's processes too, whose settings these are
        of_actor["runtime_env"] = {"env_vars": {_OUTLASTS: _OUTLASTS_MS}}
    return {
        "ray_actor_options": of_actor,
        "graceful_shutdown_timeout_s": shutdown_s,
        "health_check_timeout_s": _UNHEARD_S / _HEALTH_CHECKS,
        "health_check_period_s": min(check_s, _LONGEST_PERIOD_S),
    }
