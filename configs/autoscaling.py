"""The section `autoscaling`: how the number of engines follows the load."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from swell.configs.section import ConfigError, Seconds, Section

Share = Annotated[float, Meta(gt=0, le=1)]


class AutoscalingConfig(Section, frozen=True):
    """Settings of autoscaling. No engine reads them, so engines keep running when they change."""

    enabled: bool = False
    """Lets the number of engines follow the load, from `cluster.min_engines` to
    `cluster.max_engines`. Off by default: the engines of one machine share its cores, so more of
    them are not faster."""
    add_nodes: bool | None = None
    """Whether hosts may join the Ray cluster when engines need them, as with Ray's autoscaler or
    KubeRay's: then an engine without resources waits for a new host. If false, a scale-up that
    exceeds the resources of the hosts is refused, and one that gets no resources within 10 s is
    reverted. None: the value of `enabled`."""
    queue_s: Seconds = 1.0
    """Target for the longest time that a new request waits for a slot: the waiting requests of all
    engines, divided by the rate at which requests start. Above it the cluster scales up."""
    kv_usage: Share = 0.8
    """Share of KV blocks in use, averaged over the engines, above which the cluster scales up. If
    all blocks are in use, requests are preempted and computed twice."""
    ttft_s: Seconds | None = None
    """Target for the 90th percentile of the time to first token, measured at the ingresses; above
    it the cluster scales up. None: not used. If the target is below what an idle engine needs for a
    long prompt, the cluster grows to its limit."""
    grow_after_s: Seconds = 10.0
    """The target number of engines grows after the load was too high for this long."""
    shrink_after_s: Seconds = 300.0
    """The target number of engines shrinks after fewer engines would have sufficed for this long.
    The time is doubled, up to 16 times, if the cluster grows again soon after it has shrunk: a new
    engine loads all its weights and starts with an empty prefix cache."""

    @property
    def waits_for_room(self) -> bool:
        """The value of `add_nodes` with its default applied."""
        return self.enabled if self.add_nodes is None else self.add_nodes


def check_autoscaling(config: AutoscalingConfig, min_engines: int, max_engines: int) -> None:
    """Checks the rules between keys. Raises `ConfigError`."""
    if config.enabled and min_engines == max_engines:
        raise ConfigError(
            f"autoscaling.enabled=true, but cluster.min_engines={min_engines} and "
            f"cluster.max_engines={max_engines} are equal; set a larger cluster.max_engines, or "
            "autoscaling.enabled=false"
        )
