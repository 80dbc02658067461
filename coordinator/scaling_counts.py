"""What the manager wants and has done, in numbers: for the metrics of every ingress."""

from __future__ import annotations

import msgspec


class UpgradeStatus(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The phase of the newest upgrade, and how many have ended how."""

    phase: str = "idle"
    """idle | in progress | rolling back | failed | cancelling | cancelled."""
    done: int = 0
    failed: int = 0
    cancelled: int = 0


class ScalingCounts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the manager wants, in numbers."""

    target: int = 0
    """Engines wanted; 0: unknown."""
    pending: int = 0
    """Engines that wait for room in the Ray cluster."""
    grows: int = 0
    """How often the autoscaler has raised the target since the manager's start."""
    shrinks: int = 0
    draining_nodes: int = 0
    """Hosts with engines that Ray will take away."""
    upgrade: UpgradeStatus = UpgradeStatus()
