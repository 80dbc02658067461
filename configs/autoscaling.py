"""The section `autoscaling`: by what the number of engines follows the load."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from swell.configs.section import ConfigError, Seconds, Section

Share = Annotated[float, Meta(gt=0, le=1)]


class AutoscalingConfig(Section, frozen=True):
    """No key concerns a running engine, so engines are kept when these change."""

    enabled: bool = False
    """The number of engines follows the load, from `cluster.min_engines` to `cluster.max_engines`.
    Off by default: the engines of one machine share its cores, and more of them are not faster."""
    add_nodes: bool | None = None
    """Hosts may join the Ray cluster when engines need them, as with Ray's autoscaler or KubeRay's:
    an engine that finds no room waits for it. Without it a growth is refused that the hosts cannot
    hold, and one that finds no room within 10 s is taken back. None: as `enabled`."""
    queue_s: Seconds = 1.0
    """Longest time that a new request should wait for a slot: what waits in all engines, divided by
    the rate at which they start requests. More engines are wanted above it."""
    kv_usage: Share = 0.8
    """Share of the KV blocks in use, on average over the engines, above which more engines are
    wanted. With all blocks in use requests are preempted, and computed twice."""
    ttft_s: Seconds | None = None
    """Nine of ten requests should have their first token within this, measured at the ingresses;
    more engines are wanted if they have not. None: not followed. A time below that of an idle
    engine for a long prompt makes the cluster grow to its limit."""
    grow_after_s: Seconds = 10.0
    """More engines are wanted for so long until the target grows."""
    shrink_after_s: Seconds = 300.0
    """Fewer engines would do for so long until the target shrinks; doubled, up to 16 times, while
    the cluster grows again soon after it has shrunk. An engine that starts again loads all its
    weights and begins with an empty prefix cache."""

    @property
    def waits_for_room(self) -> bool:
        """`add_nodes`, decided."""
        return self.enabled if self.add_nodes is None else self.add_nodes


def check_autoscaling(config: AutoscalingConfig, min_engines: int, max_engines: int) -> None:
    """Raises `ConfigError`."""
    if config.enabled and min_engines == max_engines:
        raise ConfigError(
            f"autoscaling.enabled: cluster.min_engines={min_engines} and cluster.max_engines="
            f"{max_engines} leave nothing to choose; set a larger cluster.max_engines"
        )
