"""The manager's targets and past decisions as numbers, for the metrics of every ingress."""

from __future__ import annotations

import msgspec


class UpgradeStatus(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The phase of the newest upgrade, and counts of finished upgrades by result."""

    phase: str = "idle"
    """idle | in progress | rolling back | failed | cancelling | cancelled."""
    done: int = 0
    failed: int = 0
    cancelled: int = 0


class ScalingCounts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The manager's targets and decisions as numbers."""

    target: int = 0
    """Target number of engines; 0: unknown."""
    pending: int = 0
    """Number of engines that wait for resources in the Ray cluster."""
    grows: int = 0
    """How often the autoscaler has raised the target since the manager's start."""
    shrinks: int = 0
    draining_nodes: int = 0
    """Number of hosts with engines that Ray is going to remove."""
    upgrade: UpgradeStatus = UpgradeStatus()
