"""The adapters that requests may name at an ingress."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from swell.configs.lora import Adapter
from swell.coordinator.wire import ClusterView


class AdapterNames:
    """The adapters of the configuration, as this ingress found their files when it started, and the
    adapters loaded since, as the newest view of the cluster lists them."""

    def __init__(self, of_config: Mapping[str, Adapter], view: Callable[[], ClusterView]) -> None:
        self.of_config = of_config
        self._view = view

    @property
    def loaded(self) -> tuple[Adapter, ...]:
        """The adapters that were loaded while the server ran."""
        return self._view().reports.adapters

    @property
    def names(self) -> list[str]:
        return [*self.of_config, *(adapter.name for adapter in self.loaded)]

    def find(self, name: str) -> Adapter | None:
        found = self.of_config.get(name)
        return found or next((one for one in self.loaded if one.name == name), None)
