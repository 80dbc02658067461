"""How long a restarted coordinator listens before it decides anything. Pure."""

from __future__ import annotations

from swell.configs.schema import ClusterConfig


def recovery_s(config: ClusterConfig, first_heard_s: float | None, *, has_moved: bool) -> float:
    """Returns how long a restarted coordinator listens in total. `first_heard_s` is when the first
    engine introduced itself. At the predecessor's address, peers reconnect within a second and then
    send a message each heartbeat. At another address (`has_moved`, or the first engine is late),
    they must first notice that the predecessor is silent; all notice it within a heartbeat of each
    other."""
    soon_s = 1.0 + config.heartbeat_s
    limit_s = soon_s + config.stall_timeout_s
    if first_heard_s is None:
        return limit_s
    if first_heard_s <= soon_s and not has_moved:
        return soon_s
    return min(limit_s, first_heard_s + soon_s + config.heartbeat_s)
