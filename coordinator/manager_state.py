"""The state of the manager, as its checkpoint, the coordinator and the engines store it, with its
targets and past decisions as numbers for the metrics of every ingress."""

from __future__ import annotations

import msgspec

from swell.configs.lora import Adapter


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


class Sleep(msgspec.Struct, frozen=True, array_like=True):
    """State of paused engines that release memory."""

    level: int = 0
    """0: they keep everything that steps need. 1: the KV cache is freed, and the weights are in
    host memory. 2: the weights are freed too."""
    refuses: bool = False
    """Whether requests are refused during sleep; otherwise they wait."""


class NotLeading(ValueError):
    """Raised if another manager leads: the command of this one is not executed."""


class ManagerId(msgspec.Struct, frozen=True):
    """Identifies the manager that sends a command."""

    owner: str = ""
    """The manager's random name."""
    term: int = 0
    """Term of its checkpoints: greater than that of each manager before it."""


NO_MANAGER = ManagerId()
"""The sender of commands in a cluster without a known manager."""


class DesiredState(msgspec.Struct, frozen=True, array_like=True):
    """The requests of operators that hold now, and the manager that fulfils them.

    A checkpoint in Ray's GCS stores it for the manager's successor. The coordinator and the engines
    store it too, so it survives the loss of the checkpoint. The newest one by `age` is valid.
    """

    owner: str = ""
    """The manager that took over last and leads; empty: no manager has taken over yet."""
    target: int = 0
    """Target number of engines; 0: unknown."""
    pause_requested: bool = False
    """Whether an operator has requested a pause."""
    served: bool = False
    """Whether the cluster has served before."""
    data: int = 0
    """`parallel.data` of the configuration; 0: unknown."""
    term: int = 0
    """Increases with each manager that takes over."""
    number: int = 0
    """Increases with each change of the desired state."""
    adapters: tuple[Adapter, ...] = ()
    """Adapters that were loaded at run time."""
    sleep: Sleep = Sleep()
    """The sleep that an operator has requested for paused engines."""
    cache_generation: int = 0
    """How often operators have emptied the prefix caches: part of the cache salt of each request.
    """

    @property
    def age(self) -> tuple[int, int]:
        """Orders states: the newer state has the greater age."""
        return self.term, self.number


class ManagerState(msgspec.Struct, frozen=True, array_like=True):
    """The leading manager, its targets and its current operation, stored by the coordinator and all
    engines. Ingresses see a part of it."""

    desired: DesiredState = DesiredState()
    phase: str = "idle"
    """Phase of the change of engines: idle, pending, prepare, commit, drain or failed."""
    scaling: ScalingCounts = ScalingCounts()

    @property
    def manager_id(self) -> ManagerId:
        return ManagerId(self.desired.owner, self.desired.term)

    def is_led_by(self, manager: ManagerId) -> bool:
        """Whether a process with this state accepts commands of that manager. A manager with a
        higher term is accepted, too: after a restart, a coordinator may know only an older
        manager."""
        return self.desired.owner in ("", manager.owner) or manager.term > self.desired.term
