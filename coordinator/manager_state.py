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
    def of_view(self) -> dict[str, object]:
        """What ingresses know of it."""
        return {name: getattr(self, name) for name in ("phase", "scaling", "adapters", "sleep")}

    @property
    def age(self) -> tuple[int, int]:
        """Of two states the newer one has the greater."""
        return self.term, self.number
