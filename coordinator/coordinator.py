"""The coordinator as a Ray actor: a shell around `CoordinatorService`."""

from __future__ import annotations

import os

import msgspec
import ray

from swell.configs.log import configure_logging
from swell.configs.schema import ClusterConfig
from swell.coordinator.channel import ChannelAddress, ChannelKeys
from swell.coordinator.roster import Member, Roster
from swell.coordinator.service import (
    CoordinatorEndpoint,
    CoordinatorService,
    ManagerState,
    Membership,
)
from swell.coordinator.wire import ClusterView


class CoordinatorContact(msgspec.Struct, frozen=True):
    """What a member needs to talk to the coordinator and to the other members."""

    address: ChannelAddress
    keys: ChannelKeys
    pid: int


@ray.remote(num_cpus=0, max_concurrency=16, max_restarts=-1, max_task_retries=-1)
class Coordinator:
    """Knows the members of a cluster; Ray starts it again where it dies."""

    def __init__(
        self,
        config: ClusterConfig,
        lockstep: bool,
        endpoint: CoordinatorEndpoint,
        inherited: bool = False,
    ) -> None:
        """`inherited`: another actor had this endpoint before."""
        configure_logging()
        self._service = CoordinatorService(
            config,
            ray.util.get_node_ip_address(),
            lockstep=lockstep,
            endpoint=endpoint,
            recover=inherited or ray.get_runtime_context().was_current_actor_reconstructed,
        )

    def contact(self) -> CoordinatorContact:
        return CoordinatorContact(self._service.address, self._service.keys, os.getpid())

    def join(self, members: list[Member], timeout_s: float) -> Roster:
        return self._service.join(members, timeout_s)

    def leave(self, ranks: list[int]) -> Roster:
        return self._service.leave(ranks)

    def cancel_leave(self, ranks: list[int]) -> Roster:
        return self._service.cancel_leave(ranks)

    def detach(self, ranks: list[int], timeout_s: float) -> Roster:
        return self._service.detach(ranks, timeout_s)

    def remove_failed(self, ranks: list[int]) -> Roster:
        return self._service.remove_failed(ranks)

    def pause(self) -> None:
        self._service.pause()

    def resume(self) -> None:
        self._service.resume()

    def view(self) -> ClusterView:
        return self._service.view()

    def take_over(self, owner: str) -> None:
        self._service.take_over(owner)

    def note(self, note: ManagerState) -> None:
        self._service.note(note)

    def wait(self, epoch: int, timeout_s: float) -> Membership:
        return self._service.wait(epoch, timeout_s)
