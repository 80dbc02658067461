"""The coordinator as a Ray actor: a `CoordinatorService` in its own process."""

from __future__ import annotations

import os

import ray
from ray.exceptions import RayError

from swell.configs.runtime.log import configure_logging
from swell.configs.runtime.network import coordinator_ports, host_address
from swell.configs.schema import ClusterConfig
from swell.coordinator.manager_state import ManagerId, ManagerState
from swell.coordinator.roster import Member, Roster
from swell.coordinator.service import CoordinatorService, Membership
from swell.coordinator.state_machine import JoinResult
from swell.coordinator.transport.coordinator_contact import CoordinatorContact, CoordinatorEndpoint
from swell.coordinator.transport.runtime import ThreadRuntime
from swell.coordinator.wire import ClusterView

_DISCOVERY = "discovery"
"""Concurrency group of the calls that work during a recovery. They need threads of their own: calls
that wait for the end of the recovery may occupy all others, and then no engine could find this
coordinator before the coordinator gives it up."""


@ray.remote(
    num_cpus=0,
    max_concurrency=16,
    max_restarts=-1,
    max_task_retries=-1,
    concurrency_groups={_DISCOVERY: 4},
)
class Coordinator:
    """Manages the members of a cluster; Ray restarts it if it dies. Each call runs on a thread of
    Ray's, and many of them wait long at the same time. No method may be a coroutine: Ray would then
    run all calls of the actor on one event loop, and a waiting call would block the others."""

    def __init__(
        self,
        config: ClusterConfig,
        lockstep: bool,
        endpoint: CoordinatorEndpoint,
        inherited: bool = False,
        namespace: str = "",
    ) -> None:
        """`inherited`: another actor had this endpoint before. `namespace`: that of the actor's
        name, which by default is the namespace of the program that creates the actor."""
        configure_logging()
        self._namespace = namespace
        host = host_address(config.interface, ray.util.get_node_ip_address())
        self._service = CoordinatorService(
            config,
            ThreadRuntime(host, config.stall_timeout_s, coordinator_ports(config.port_range)),
            lockstep=lockstep,
            endpoint=endpoint.on_host(host),
            recover=inherited or ray.get_runtime_context().was_current_actor_reconstructed,
        )

    @ray.method(concurrency_group=_DISCOVERY)  # type: ignore[untyped-decorator]
    def probe(self) -> bool:
        return self._service.probe()

    @ray.method(concurrency_group=_DISCOVERY)  # type: ignore[untyped-decorator]
    def contact(self) -> CoordinatorContact:
        name, service = ray.get_runtime_context().get_actor_name() or "", self._service
        return CoordinatorContact(service.address, service.keys, os.getpid(), name, self._namespace)

    # ---------------------------------------------------------------- the methods of the service

    def view(self) -> ClusterView:
        return self._service.view()

    def membership(self) -> Membership:
        return self._service.membership()

    def wait(self, epoch: int, timeout_s: float) -> Membership:
        return self._service.wait(epoch, timeout_s)

    def join(
        self, members: list[Member], timeout_s: float, by: ManagerId, earlier: list[int]
    ) -> JoinResult:
        return self._service.join(members, timeout_s, by, earlier)

    def leave(self, ranks: list[int], by: ManagerId) -> Roster:
        return self._service.leave(ranks, by)

    def cancel_leave(self, ranks: list[int], by: ManagerId) -> Roster:
        return self._service.cancel_leave(ranks, by)

    def detach(
        self, ranks: list[int], timeout_s: float, by: ManagerId, idle_epoch: int | None
    ) -> Roster:
        return self._service.detach(ranks, timeout_s, by, idle_epoch)

    def remove_failed(
        self, ranks: list[int], by: ManagerId, incarnations: list[int] | None
    ) -> Roster:
        return self._service.remove_failed(ranks, by, incarnations)

    def pause(self, by: ManagerId) -> Roster:
        return self._service.pause(by)

    def resume(self, by: ManagerId) -> Roster:
        return self._service.resume(by)

    def save_manager_state(self, state: ManagerState) -> ManagerState:
        return self._service.save_manager_state(state)


def find(known: CoordinatorContact, timeout_s: float) -> CoordinatorContact | None:
    """Returns the coordinator's current contact as Ray knows it, or None: see
    `finder.FindCoordinator`. Waits for a coordinator that is restarting."""
    try:
        actor = ray.get_actor(known.name, namespace=known.namespace)
        contact: CoordinatorContact = ray.get(actor.contact.remote(), timeout=timeout_s)
    except (ValueError, RayError):  # no such actor, or no answer
        return None
    return contact
