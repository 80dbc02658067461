"""The coordinator as a Ray actor: a shell around `CoordinatorService`."""

from __future__ import annotations

import os

import msgspec
import ray

from swell.configs.schema import ClusterConfig
from swell.coordinator import roster
from swell.coordinator.channel import ChannelAddress, ChannelKeys
from swell.coordinator.roster import Member, Roster
from swell.coordinator.service import CoordinatorService
from swell.coordinator.wire import ClusterView


class CoordinatorContact(msgspec.Struct, frozen=True):
    """What a member needs to talk to the coordinator and to the other members."""

    address: ChannelAddress
    keys: ChannelKeys
    pid: int


@ray.remote(num_cpus=0, max_concurrency=8)
class Coordinator:
    """Knows the members of a cluster. Changes of membership come from the manager alone."""

    def __init__(self, config: ClusterConfig) -> None:
        self._service = CoordinatorService(config, ray.util.get_node_ip_address())

    def contact(self) -> CoordinatorContact:
        return CoordinatorContact(self._service.address, self._service.keys, os.getpid())

    def join(self, members: list[Member]) -> Roster:
        return self._service.change(lambda now: roster.join(now, members))

    def leave(self, ranks: list[int]) -> Roster:
        return self._service.change(lambda now: roster.leave(now, ranks))

    def remove(self, ranks: list[int]) -> Roster:
        return self._service.change(lambda now: roster.remove(now, ranks))

    def view(self) -> ClusterView:
        return self._service.view()
