"""What coordinator and engines keep of the manager, and ingresses know of it."""

from __future__ import annotations

import msgspec

from swell.configs.lora import Adapter
from swell.coordinator.scaling_counts import ScalingCounts


class Sleep(msgspec.Struct, frozen=True, array_like=True):
    """Paused engines that give memory back."""

    level: int = 0
    """0: they hold all that steps need; 1: no KV cache, and their weights in the memory of the
    host; 2: no weights."""
    refuses: bool = False
    """Whether requests are refused meanwhile; else they wait."""


class NotLeading(ValueError):
    """Another manager leads: what this one has called for does not happen."""


class ManagerId(msgspec.Struct, frozen=True):
    """The manager that a command comes from."""

    owner: str = ""
    """Its name, a random one."""
    term: int = 0
    """Of its checkpoints: greater than that of each manager before it."""


NO_MANAGER = ManagerId()
"""Its commands count where no manager is known."""


class ManagerState(msgspec.Struct, frozen=True, array_like=True):
    """Which manager leads, what it wants and what it does, kept by the coordinator and all engines.

    The newest counts, by `age`: so it outlives the coordinator and the manager together, even where
    the manager's checkpoint is lost.
    """

    owner: str = ""
    """The manager that leads; empty: none has spoken yet."""
    phase: str = "idle"
    """Of the change of engines: idle, pending, prepare, commit, drain or failed."""
    target: int = 0
    """Engines wanted; 0: unknown."""
    pause_requested: bool = False
    """An operator wants a pause."""
    served: bool = False
    """The cluster was up once."""
    data: int = 0
    """`parallel.data` of the configuration; 0: unknown."""
    term: int = 0
    """Grows with each manager that takes over."""
    number: int = 0
    """Grows with each change of what is wanted."""
    scaling: ScalingCounts = ScalingCounts()
    adapters: tuple[Adapter, ...] = ()
    """Those that came while the server ran."""
    sleep: Sleep = Sleep()
    """As deep as an operator wants paused engines to sleep."""

    @property
    def manager_id(self) -> ManagerId:
        return ManagerId(self.owner, self.term)

    def is_led_by(self, manager: ManagerId) -> bool:
        """Whether commands of this manager count for who knows this state. That of a predecessor is
        what a coordinator begins with whose own predecessor died before the engines had the
        newest."""
        return self.owner in ("", manager.owner) or manager.term > self.term

    @property
    def of_view(self) -> dict[str, object]:
        """What ingresses know of it."""
        return {name: getattr(self, name) for name in ("phase", "scaling", "adapters", "sleep")}

    @property
    def age(self) -> tuple[int, int]:
        """Of two states the newer one has the greater."""
        return self.term, self.number
