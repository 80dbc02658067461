"""Adapts the engines of one manager to the load and to hosts that Ray takes away. No decisions:
those are in `autoscaler.py` and `node_drains.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from swell.cluster.control import cluster_status
from swell.cluster.control.engines.fleet import Fleet
from swell.cluster.control.engines.placement import Placement
from swell.cluster.control.plan import control_state, resources
from swell.cluster.control.plan.autoscaler import Autoscaler
from swell.cluster.control.plan.control_state import ControlState, Leadership
from swell.cluster.control.plan.load_signals import LoadSeries
from swell.cluster.control.plan.node_drains import Moves, plan_moves
from swell.cluster.text.json_types import JsonObject
from swell.configs.runtime.log import StructuredLogger
from swell.configs.schema import Config
from swell.coordinator.manager_state import ScalingCounts, UpgradeStatus
from swell.coordinator.service import Membership


class Elasticity:
    """Follows load and hosts for one manager, in its event loop."""

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        placement: Placement,
        wanted: Callable[[], tuple[int, Config]],
    ) -> None:
        """`wanted`: returns the target number of engines and the configuration with which they
        start."""
        self._config, self._fleet, self._placement = config, fleet, placement
        self._wanted = wanted
        limits = config.cluster
        self._autoscaler = Autoscaler(config.autoscaling, limits.min_engines, limits.max_engines)
        self._series = LoadSeries()
        self._draining: Mapping[str, float] = {}
        """Seconds until nodes are taken away, by node id, from the last poll."""
        self._log = StructuredLogger("cluster.elasticity")

    def follow_load(self, now: Membership, state: ControlState) -> ControlState | None:
        """Returns the state with a new target if the load requires one, else None. Decides nothing
        before the cluster has served, or while it is paused."""
        is_leader = state.leadership is Leadership.LEADER
        if not (self._config.autoscaling.enabled and is_leader):
            return None
        clock_s = asyncio.get_running_loop().time()
        staying = self._fleet.view().staying
        load = self._series.observe(now.view, now.first_tokens, staying, clock_s)
        if load is None or not state.has_served or state.pause_requested:
            self._autoscaler.reset()
            return None
        max_rows = self._wanted()[1].scheduler.max_rows
        decision = self._autoscaler.observe(load, state.change.target, max_rows, clock_s)
        if decision is None:
            return None
        self._log.info(
            "load", before=decision.before, engines=decision.engines, reason=decision.reason
        )
        return control_state.follow_load(state, decision.engines, self._config.cluster)

    async def follow_nodes_forever(self) -> None:
        """Replaces engines on hosts that will be taken away, so that they leave before their host
        does."""
        while True:
            try:
                before, self._draining = self._draining, await self._placement.draining_nodes()
                self._move_engines({**before, **self._draining})
            except Exception as error:  # the GCS is unavailable: retried at the next poll
                self._log.warning("hosts are not known", error=f"{type(error).__name__}: {error}")
            await asyncio.sleep(2 * self._config.cluster.heartbeat_s)

    def _move_engines(self, draining: Mapping[str, float]) -> None:
        """Moves, drains or keeps engines. `draining`: also contains the nodes of the previous poll:
        when a host is gone its notice is gone too, and its engines are known to be dead one poll
        later."""
        drain_timeout_s = self._config.cluster.drain_timeout_s
        fleet = self._fleet
        moves = plan_moves(fleet.view(), self._wanted()[0], draining, drain_timeout_s)
        for rank in moves.move:
            self._log.warning("host is being removed: engine moves", rank=rank)
            fleet.move(rank)
        for rank, timeout_s in moves.leave.items():
            fleet.leave(rank, timeout_s, is_drain=True)
        for rank in moves.stay:
            self._log.warning("host is no longer being removed: engine stays", rank=rank)
            fleet.stay(rank)
        if moves != Moves():
            fleet.on_change()

    def counts(self, upgrade: UpgradeStatus) -> ScalingCounts:
        fleet, policy = self._fleet.view(), self._autoscaler
        nodes = {engine.node for engine in fleet.engines} & set(self._draining)
        pending = len(fleet.pending)
        target, draining = self._wanted()[0], len(nodes)
        return ScalingCounts(target, pending, policy.grows, policy.shrinks, draining, upgrade)

    def describe(self) -> JsonObject:
        """Returns parts of the body of `GET /admin/cluster`."""
        bundle, count = resources.bundles(self._wanted()[1])
        now = asyncio.get_running_loop().time()
        return {
            "autoscaling": cluster_status.autoscaling(self._autoscaler, self._config, now),
            "pending": cluster_status.pending(self._fleet.starting, bundle, count),
            "draining_nodes": [*cluster_status.draining_nodes(self._fleet.engines, self._draining)],
        }
