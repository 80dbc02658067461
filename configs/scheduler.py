"""The section `scheduler`: what an engine computes in a step."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from swell.configs.section import ConfigError, NonNegative, Positive, Section


class SchedulerConfig(Section, frozen=True):
    max_tokens_per_step: Positive = 2048
    """Token budget of one step, over all rows."""
    max_rows: Positive = 256
    """Maximum number of requests that run at once in one engine (slots)."""
    max_chunk_tokens: NonNegative = 0
    """Maximum number of tokens of one prompt in a step; 0: the whole budget."""
    policy: Literal["fcfs", "priority"] = "fcfs"
    """Order in which waiting requests start. `fcfs`: by arrival at their ingress. `priority`: by
    the priority of the requests, then as `fcfs`."""
    steps_in_flight: Annotated[int, Meta(ge=1, le=16)] = 2
    """1: the host waits for each step. 2: the host prepares the next step while one is computed. A
    pipeline of N stages needs at least N to keep all stages busy."""
    steps_per_plan: Annotated[int, Meta(ge=1, le=32)] = 1
    """Tokens of each row that the device computes, one after the other, before it returns to the
    host, in steps without prompts (multi-step scheduling). For a row that finishes earlier the
    remaining tokens are discarded, except on a CPU with one worker, and a new request waits
    for all of them. This is worthwhile if the host takes longer than the device
    (`docs/lab/performance.md`)."""


def check_scheduler(config: SchedulerConfig, drafts_method: str, shares_experts: bool) -> None:
    """Checks the rules between these keys, `drafts.method` and `parallel.expert`."""
    steps = config.steps_per_plan
    if steps > 1 and drafts_method != "none":
        raise ConfigError(
            f"scheduler.steps_per_plan={steps} needs drafts.method=none, but it is "
            f"{drafts_method}: a step with drafts already returns several tokens; set one of the "
            "two keys"
        )
    if steps > 1 and shares_experts:
        raise ConfigError(
            f"scheduler.steps_per_plan={steps} cannot be combined with parallel.expert=true: "
            "engines that share experts agree before each step; set scheduler.steps_per_plan=1"
        )
