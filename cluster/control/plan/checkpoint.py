"""The state that a manager hands to its successor, through Ray's GCS."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from swell.cluster.control.plan.drain_record import DrainRecord
from swell.cluster.control.plan.versions import UpgradeRecord
from swell.coordinator.manager_state import DesiredState


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

    def with_age(self, term: int, number: int) -> ClusterCheckpoint:
        """Returns the same state, with another age."""
        return replace(self, desired=replace(self.desired, term=term, number=number))
