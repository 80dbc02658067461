"""Adapters (LoRA) that requests name instead of the model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from swell.cluster.text.params.sampling_params import DERIVED_SALT
from swell.configs.error_text import shown
from swell.configs.lora import MAX_ADAPTERS, Adapter, LoraConfig


def salt_of_adapter(adapter: Adapter, cache_salt: str | None) -> str:
    """Returns the cache salt of a request with an adapter, derived from its own salt: the same
    tokens have different KV with the adapter. No request can set this salt, since a client's salt
    must not begin with `DERIVED_SALT`."""
    text = f"{adapter.digest} {'' if cache_salt is None else 'salt ' + cache_salt}"
    return DERIVED_SALT + hashlib.blake2b(text.encode(), person=b"swell-adapter").hexdigest()


class AdapterRefused(ValueError):
    """An adapter could not be loaded or unloaded; the message says why, and what to do."""


class LoadedAdapters:
    """The adapters that were loaded while the server, or an `LLM`, runs."""

    def __init__(
        self, config: LoraConfig, model: str, on_change: Callable[[], None] = lambda: None
    ) -> None:
        """`model` is the name of the model itself in requests."""
        self._config, self._model, self._on_change = config, model, on_change
        self.all: tuple[Adapter, ...] = ()

    def take_over(self, adapters: tuple[Adapter, ...]) -> None:
        """Starts with the adapters that an earlier server had loaded."""
        self.all = adapters

    def load(self, adapter: Adapter, in_place: bool) -> None:
        """Lets requests name the adapter. With `in_place`, it may replace an adapter with the same
        name. Raises AdapterRefused."""
        name = shown(adapter.name)
        if not self._config.enabled:
            raise AdapterRefused(
                f"adapter {name} cannot be loaded: lora.enabled=false; set lora.enabled=true, or "
                "list the adapter in lora.adapters"
            )
        if adapter.name in (*self._config.adapters, self._model):
            raise AdapterRefused(
                f"the name {name} belongs to the model or to an adapter of lora.adapters, which "
                "cannot be replaced; choose another name"
            )
        others = tuple(one for one in self.all if one.name != adapter.name)
        if others != self.all and not in_place:
            raise AdapterRefused(
                f"the lora adapter {name} has already been loaded; unload it first, or set "
                "load_inplace"
            )
        if len(others) >= MAX_ADAPTERS:
            raise AdapterRefused(
                f"adapter {name} cannot be loaded: {len(others)} adapters are loaded, and the "
                f"limit is {MAX_ADAPTERS}; unload one"
            )
        self.all = (*others, adapter)
        self._on_change()

    def unload(self, name: str) -> None:
        """Removes an adapter. Requests that have begun with it finish with it. Raises
        AdapterRefused."""
        others = tuple(one for one in self.all if one.name != name)
        if others == self.all:
            stays = name in self._config.adapters
            why = "is listed in lora.adapters" if stays else "was not loaded"
            raise AdapterRefused(f"the lora adapter {shown(name)} cannot be unloaded: it {why}")
        self.all = others
        self._on_change()
