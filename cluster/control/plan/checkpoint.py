"""The state that a manager hands to its successor, through Ray's GCS."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from swell.cluster.control.plan.versions import UpgradeRecord
from swell.coordinator.manager_state import DesiredState


class DrainRecord(msgspec.Struct, frozen=True):
    """One drain, for the manager that continues it. Append-only: another release may read it. Times
    are seconds since 1970: the clocks of two hosts differ by little compared with a drain."""

    name: str
    """The name of this start of the engine."""
    left_at: float
    """When the engine was first told to leave."""
    deadline: float
    """When the engine is detached even if it has requests."""
    is_named: bool = False
    """The engine was selected by an operator, an upgrade or the loss of its host: it is not
    kept."""
    next_version: str = ""
    """Name of the version whose weights the engine gets afterwards; empty: it stops."""
    unmarked_s: float = 0.0
    """How long it has once it gets no more requests, in seconds; 0: `deadline` says when it ends,
    since the coordinator knows that it leaves."""


class ClusterCheckpoint(msgspec.Struct, frozen=True):
    """State of a manager, for its successor. Append-only: another release may read it."""

    desired: DesiredState = DesiredState()
    cluster_id: str = ""
    """Digest of the part of the configuration that no upgrade changes. The checkpoint is void for a
    configuration with another digest."""
    upgrade: UpgradeRecord = UpgradeRecord()
    """The versions of the engines."""
    drains: tuple[DrainRecord, ...] = ()
    """Drains of leaving engines."""
    is_claim: bool = False
    """The manager has taken over and has not written a state yet: the previous manager's state is
    valid."""

    def with_age(self, term: int, number: int) -> ClusterCheckpoint:
        """Returns the same state, with another age."""
        return replace(self, desired=replace(self.desired, term=term, number=number))
