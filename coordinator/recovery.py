"""How long a coordinator that was started again listens before it decides anything: pure."""

from __future__ import annotations

from swell.configs.schema import ClusterConfig


def recovery_s(config: ClusterConfig, first_heard_s: float | None, *, has_moved: bool) -> float:
    """How long a successor listens in all; `first_heard_s`: when the first engine introduced
    itself. Where the predecessor was, peers connect within a second, and send each heartbeat. If it
    was elsewhere, which only who `has_moved` knows before it is found, they have to notice its
    silence first, which began for all at once, but for a heartbeat."""
    soon_s = 1.0 + config.heartbeat_s
    limit_s = soon_s + config.stall_timeout_s
    if first_heard_s is None:
        return limit_s
    if first_heard_s <= soon_s and not has_moved:
        return soon_s
    return min(limit_s, first_heard_s + soon_s + config.heartbeat_s)
