"""The desired state that a manager hands to its successor, through Ray's GCS."""

from __future__ import annotations

import msgspec

from swell.cluster.control.plan.drain_record import DrainRecord
from swell.cluster.control.plan.versions import UpgradeRecord
from swell.configs.lora import Adapter
from swell.coordinator.manager_state import ManagerState, Sleep
from swell.coordinator.scaling_counts import ScalingCounts


class ClusterCheckpoint(msgspec.Struct, frozen=True):
    """Desired state of a manager, for its successor. Append-only: another release may read it."""

    owner: str = ""
    """The manager that took over last and leads."""
    identity: str = ""
    """Digest of the part of the configuration that no upgrade changes. The checkpoint is void for a
    configuration with another digest."""
    target: int = 0
    """The target number of engines; 0: unknown."""
    pause_requested: bool = False
    """An operator has requested a pause."""
    served: bool = False
    """The cluster has served once."""
    data: int = 0
    """`parallel.data` of the configuration; 0: unknown."""
    term: int = 0
    """Increases with each manager that takes over."""
    number: int = 0
    """Increases with each change of the desired state."""
    upgrade: UpgradeRecord = UpgradeRecord()
    """The versions of the engines."""
    drains: tuple[DrainRecord, ...] = ()
    """Drains of leaving engines."""
    adapters: tuple[Adapter, ...] = ()
    """Adapters that were loaded while the server ran."""
    sleep: Sleep = Sleep()
    """The sleep level that an operator requested for paused engines."""

    @property
    def age(self) -> tuple[int, int]:
        """Age, comparable with that of a `ManagerState`: the greater one is newer."""
        return self.term, self.number

    def manager_state(self, phase: str, scaling: ScalingCounts) -> ManagerState:
        """Returns the part of the checkpoint that coordinator and engines keep."""
        return ManagerState(
            self.owner,
            phase,
            self.target,
            self.pause_requested,
            self.served,
            self.data,
            self.term,
            self.number,
            scaling,
            self.adapters,
            self.sleep,
        )
