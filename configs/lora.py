"""The section `lora`: adapters that requests may name in place of the model."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from swell.configs.section import NO_CONTROLS, ConfigError, FilledText, Section
from swell.configs.shown import shown

MAX_ADAPTERS = 64
MAX_RANK = 64
MAX_NAME_CHARS = 256

AdapterName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS, pattern=NO_CONTROLS)]


class LoraConfig(Section, frozen=True):
    adapters: Annotated[dict[AdapterName, FilledText], Meta(max_length=MAX_ADAPTERS)] = {}
    """Name in requests -> folder in PEFT's format, relative to this file, at the same path on every
    host. Every worker loads all of them at its start, and keeps them."""
    enabled: bool = False
    """Whether further adapters may come and go while the server runs, by
    `POST /v1/load_lora_adapter`: who may call it names folders that hosts read."""
    max_adapters: Annotated[int, Meta(ge=1, le=MAX_ADAPTERS)] = 8
    """Of those that came while the server runs, how many a worker has in memory at a time: it
    reserves room for as many of `max_rank`. Requests with one more wait until no request uses one
    of these; the one that was used least recently gives way."""
    max_rank: Annotated[int, Meta(ge=1, le=MAX_RANK)] = 16
    """An adapter of a larger rank is refused: its rank is paid in each step that uses it. As in
    vLLM."""

    @property
    def is_on(self) -> bool:
        return self.enabled or bool(self.adapters)

    @property
    def reason(self) -> str:
        """The key that turns adapters on."""
        if self.enabled:
            return "lora.enabled=true"
        return f"lora.adapters ({', '.join(map(shown, self.adapters))})"


class Adapter(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An adapter as requests bring it to an engine, which loads it at its first use."""

    name: str
    folder: str
    """Absolute, the same on every host."""
    digest: str
    """Of its files: other files are another adapter, whatever its name."""


def check_lora(lora: LoraConfig, served_name: str, backend: str, runner: str, expert: bool) -> None:
    """Raise ConfigError for what no model serves adapters with."""
    if not lora.is_on:
        return
    if served_name in lora.adapters:
        raise ConfigError(
            f"lora.adapters has the name {shown(served_name)}, which is that of the model itself; "
            "give the adapter another one, or set model.name",
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
                f"{setting} does not go with {lora.reason}: adapters are computed by native dense "
                "models that sample; merge the adapter into a copy of the weights and serve that",
                "lora.adapters",
            )
