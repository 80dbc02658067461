"""Compares a fleet with the roster and corrects differences. No decisions."""

from __future__ import annotations

from swell.cluster.control.engines.engine_handle import EngineHandle, StartFailed
from swell.cluster.control.engines.fleet import Fleet
from swell.cluster.control.engines.placement import Placement
from swell.cluster.control.ray.actor_errors import ActorRaised
from swell.cluster.control.ray.coordinator_handle import CoordinatorHandle
from swell.coordinator.roster import Member, MemberState
from swell.coordinator.service import Membership


class RosterCheck:
    """Corrects differences between one fleet and the roster, in the fleet's event loop."""

    def __init__(
        self,
        fleet: Fleet,
        coordinator: CoordinatorHandle,
        placement: Placement,
        stall_timeout_s: float,
    ) -> None:
        self._fleet, self._coordinator, self._placement = fleet, coordinator, placement
        self._stall_timeout_s = stall_timeout_s

    async def compare(self, now: Membership) -> None:
        """Corrects differences: engines that are missing from the roster or have another state
        there, and members that are not engines of this cluster."""
        fleet = self._fleet
        reasons = {engine.incarnation: engine.reason for engine in now.stalled_engines}
        for rank, handle in list(fleet.engines.items()):
            if handle.in_transition or fleet.engines.get(rank) is not handle:
                continue
            member = handle.find_in(now.view.roster)
            if member is None:
                assert handle.ready is not None
                reason = reasons.get(handle.ready.incarnation)
                fleet.tasks.spawn(self._on_missing(handle, reason))
            elif handle.leaving and member.state is MemberState.ACTIVE:
                await self._coordinator.leave([rank])
            elif not handle.leaving and member.state is MemberState.LEAVING:
                await self._coordinator.cancel_leave([rank])
        listed = [
            handle
            for handle in fleet.dismissed
            if now.view.roster.find(handle.rank) is not None and not handle.in_transition
        ]
        if listed:
            fleet.tasks.spawn(fleet.detach_again(listed))
        ours = {*fleet.engines, *fleet.starting, *fleet.ending}
        members = now.view.roster.members
        if gone := [each for each in members if each.rank not in ours or self._has_ended(each)]:
            incarnations = [member.incarnation for member in gone]
            await self._coordinator.remove_failed([member.rank for member in gone], incarnations)

    def _has_ended(self, member: Member) -> bool:
        """Whether the next engine of the rank starts, and the roster lists the one before it."""
        handle = self._fleet.starting.get(member.rank)
        if handle is None or handle.in_transition:
            return False
        return self._fleet.ended.get(member.rank) == member.incarnation

    async def _on_missing(self, handle: EngineHandle, reason: str | None) -> None:
        """Handles an engine that is missing from the roster. `reason`: why the coordinator removed
        it as stalled. Without a reason the coordinator does not know the engine, which joins again
        if it answers."""
        with self._fleet.transition([handle]):
            reason = reason or await self._rejoin(handle)
        if reason is not None:
            await self._fleet.on_engine_dead(handle, reason, stopped_s=self._stall_timeout_s)

    async def _rejoin(self, handle: EngineHandle) -> str | None:
        """Lets the engine join again. Returns why it cannot. If the coordinator does not answer, a
        later view decides."""
        fleet = self._fleet
        try:
            await self._placement.refresh(handle)
            if handle.ready is not None and handle.ready.version != handle.version_name:
                return f"it runs {handle.ready.version}, not {handle.version_name}"
            async with fleet.group_change_lock:
                if fleet.engines.get(handle.rank) is handle:  # it was not detached meanwhile
                    for failure in (await fleet.join([handle])).values():
                        if isinstance(failure, StartFailed | ActorRaised):
                            raise failure
        except Exception as error:
            return f"it is not in the roster and cannot join: {type(error).__name__}: {error}"
        return None
