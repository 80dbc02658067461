"""The section `lora`: adapters that requests may name in place of the model."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from swell.configs.error_text import shown
from swell.configs.section import NO_CONTROLS, ConfigError, FilledText, Section

MAX_ADAPTERS = 64
MAX_RANK = 64
MAX_NAME_CHARS = 256

AdapterName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS, pattern=NO_CONTROLS)]


class LoraConfig(Section, frozen=True):
    adapters: Annotated[dict[AdapterName, FilledText], Meta(max_length=MAX_ADAPTERS)] = {}
    """Name in requests -> folder in PEFT's format, relative to this file, at the same path on every
    host. Every worker loads all of them when it starts, and keeps them."""
    enabled: bool = False
    """Whether further adapters may be loaded and unloaded while the server runs, with `POST
    /v1/load_lora_adapter`: its callers choose folders that the hosts read."""
    max_adapters: Annotated[int, Meta(ge=1, le=MAX_ADAPTERS)] = 8
    """How many of the adapters that were loaded at run time a worker holds in memory at once. It
    reserves memory for this many adapters of rank `max_rank`. Requests for one more adapter wait
    until no request uses one of these; the least recently used one is evicted."""
    max_rank: Annotated[int, Meta(ge=1, le=MAX_RANK)] = 16
    """An adapter with a larger rank is refused: the cost of each step that uses an adapter grows
    with its rank. As in vLLM."""

    @property
    def is_on(self) -> bool:
        return self.enabled or bool(self.adapters)

    @property
    def reason(self) -> str:
        """The key that turns adapters on, for error messages."""
        if self.enabled:
            return "lora.enabled=true"
        return f"lora.adapters ({', '.join(map(shown, self.adapters))})"


class Adapter(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An adapter as a request carries it to an engine, which loads it at its first use."""

    name: str
    folder: str
    """Absolute path, the same on every host."""
    digest: str
    """Digest of its files: other files are another adapter, even under the same name."""


def check_lora(lora: LoraConfig, served_name: str, backend: str, runner: str, expert: bool) -> None:
    """Raises ConfigError if the model or the parallelism does not support adapters."""
    if not lora.is_on:
        return
    if served_name in lora.adapters:
        raise ConfigError(
            f"lora.adapters has the name {shown(served_name)}, which is the name of the model "
            "itself; rename the adapter, or set model.name",
            "lora.adapters",
        )
    wrong = {
        "model.backend=transformers": backend == "transformers",
        "model.runner=pooling": runner == "pooling",
        "parallel.expert=true": expert,
    }
    for setting, is_set in wrong.items():
        if is_set:
            raise ConfigError(
                f"{setting} cannot be combined with {lora.reason}: only native dense models that "
                "generate text support adapters; merge the adapter into a copy of the weights "
                "and serve this copy",
                "lora.adapters",
            )
