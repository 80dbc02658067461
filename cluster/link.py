"""An ingress's ends of the channels: one to the coordinator, one to each engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from swell.configs.log import FactLogger
from swell.coordinator.channel import AsyncOutlet, ChannelAddress, ChannelKeys
from swell.coordinator.roster import Member
from swell.coordinator.wire import ClusterView, Watch
from swell.engine.wire import EngineCoreOutputs

OnView = Callable[[ClusterView, list[int]], None]
OnOutputs = Callable[[EngineCoreOutputs], None]


class _Link:
    """One engine: an outlet and the task that hears it."""

    def __init__(self, member: Member, keys: ChannelKeys, on_outputs: OnOutputs) -> None:
        self.address = member.address
        self.outlet: AsyncOutlet[EngineCoreOutputs] = AsyncOutlet(
            member.address, EngineCoreOutputs, keys
        )
        self._task = asyncio.create_task(_hear(self.outlet, on_outputs))

    def close(self) -> None:
        self._task.cancel()
        self.outlet.close()


class EngineLinks:
    """Follows the roster: opens links to engines that came, closes those of engines that left.

    The callbacks run in the event loop, one at a time: `on_view` with each view of the coordinator
    and the ranks whose engines it no longer has, of which nothing is heard afterwards;
    `on_outputs` with each message of an engine.
    """

    def __init__(
        self,
        coordinator: ChannelAddress,
        keys: ChannelKeys,
        client_index: int,
        *,
        on_view: OnView,
        on_outputs: OnOutputs,
    ) -> None:
        self._keys = keys
        self._on_view = on_view
        self._on_outputs = on_outputs
        self._links: dict[int, _Link] = {}
        self._epoch = -1
        self._outlet: AsyncOutlet[ClusterView] = AsyncOutlet(coordinator, ClusterView, keys)
        self._outlet.send(Watch(client_index))
        self._task = asyncio.create_task(_hear(self._outlet, self._follow))

    def send(self, rank: int, message: Any) -> None:
        """Hand a message to an engine; dropped if the engine has left."""
        link = self._links.get(rank)
        if link is not None:
            link.outlet.send(message)

    def close(self) -> None:
        self._task.cancel()
        self._outlet.close()
        for link in self._links.values():
            link.close()
        self._links.clear()

    def _follow(self, view: ClusterView) -> None:
        if view.roster.epoch < self._epoch:
            return
        self._epoch = view.roster.epoch
        members = {member.rank: member for member in view.roster.members}
        lost = [
            rank
            for rank, link in self._links.items()
            if rank not in members or members[rank].address != link.address
        ]
        for rank in lost:
            self._links.pop(rank).close()
        for rank, member in members.items():
            if rank not in self._links:
                self._links[rank] = _Link(member, self._keys, self._on_outputs)
        self._on_view(view, lost)


async def _hear(outlet: AsyncOutlet[Any], take: Callable[[Any], None]) -> None:
    """Hand over every message; one that cannot be handled is logged and harms no other."""
    log = FactLogger("cluster.link")
    while True:
        try:
            take(await outlet.next())
        except Exception as error:
            log.error("message not handled", error=f"{type(error).__name__}: {error}")
