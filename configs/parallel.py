"""The section `parallel`: how a model is split over workers and engines."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from swell.configs.section import ConfigError, NonNegative, Positive, Processes, Section


class ParallelConfig(Section, frozen=True):
    data: Processes = 1
    """Number of engines at the start. Deploying the application again with another number sets a
    new target."""
    tensor: Processes = 1
    """Tensor parallelism: number of workers that split each layer of one engine."""
    pipeline: Processes = 1
    """Pipeline parallelism: number of stages that split the layers of one engine."""
    expert: bool = False
    """Expert parallelism: engines share experts and run their steps in lockstep (waves)."""
    redundant_experts: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Additional copies of experts in each layer, over all engines that share experts: the most
    used experts are copied."""
    balance_steps: NonNegative = 0
    """Number of steps after which engines that share experts check whether another placement would
    balance the load better, and move experts; 0: never."""
    prefill_engines: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Prefill-decode disaggregation: the first N engines compute prompts, and the others decode; 0:
    each engine does both. Needs `cache.handover_folder`."""
    prefill_min_tokens: Positive = 512
    """If a decode engine lacks fewer tokens of a prompt than this, it computes the prompt
    itself."""
    executor: Literal["auto", "inproc", "ray"] = "auto"
    """Placement of an engine's workers; `auto`: in the engine's process if there is only one
    worker."""

    @property
    def world(self) -> int:
        """Number of workers of one engine."""
        return self.tensor * self.pipeline


def check_parallel(parallel: ParallelConfig) -> None:
    """Checks the rules between keys. Raises `ConfigError`."""
    for key in ("redundant_experts", "balance_steps"):
        if (value := getattr(parallel, key)) and not parallel.expert:
            raise ConfigError(
                f"parallel.{key}={value} needs engines that share experts; set "
                f"parallel.expert=true, or parallel.{key}=0"
            )
    if parallel.redundant_experts and not parallel.balance_steps:
        raise ConfigError(
            f"parallel.redundant_experts={parallel.redundant_experts} needs "
            "parallel.balance_steps, the number of steps between two choices of the experts to "
            "copy; set it to a few thousand"
        )
