"""How a model is split over workers and engines: its section of the configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from swell.configs.section import ConfigError, NonNegative, Positive, Processes, Section


class ParallelConfig(Section, frozen=True):
    data: Processes = 1
    """Engines at start. Deploying the application again with another number sets a new target."""
    tensor: Processes = 1
    """Workers that split each layer of one engine."""
    pipeline: Processes = 1
    """Stages that split the layers of one engine."""
    expert: bool = False
    """Engines share experts and run in waves."""
    redundant_experts: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Copies of experts beyond the first, in each layer, that engines which share experts hold
    together: those that are chosen most."""
    balance_steps: NonNegative = 0
    """Steps after which engines that share experts look whether other places would share the load
    better, and move them; 0: never."""
    prefill_engines: Annotated[int, Meta(ge=0, le=4096)] = 0
    """The first so many engines compute prompts, and the others continue them; 0: each engine does
    both. Needs `cache.handover_folder`."""
    prefill_min_tokens: Positive = 512
    """A prompt of which an engine that continues lacks fewer tokens is computed there."""
    executor: Literal["auto", "inproc", "ray"] = "auto"
    """Where an engine's workers run; `auto`: in the engine's process if there is only one."""

    @property
    def world(self) -> int:
        """Workers of one engine."""
        return self.tensor * self.pipeline


def check_parallel(parallel: ParallelConfig) -> None:
    """Check the rules between keys."""
    for key in ("redundant_experts", "balance_steps"):
        if (value := getattr(parallel, key)) and not parallel.expert:
            raise ConfigError(
                f"parallel.{key}={value} is for engines that share experts; set "
                f"parallel.expert=true, or parallel.{key}=0"
            )
    if parallel.redundant_experts and not parallel.balance_steps:
        raise ConfigError(
            f"parallel.redundant_experts={parallel.redundant_experts} needs "
            "parallel.balance_steps, after which copies are made of what is chosen most; set it to "
            "some thousands"
        )
