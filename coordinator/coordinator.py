"""The coordinator as a Ray actor: `CoordinatorService` in a process of its own."""

from __future__ import annotations

import os

import ray
from ray.exceptions import RayError

from swell.configs.log import configure_logging
from swell.configs.network import coordinator_ports, host_address
from swell.configs.schema import ClusterConfig
from swell.coordinator.contact import CoordinatorContact, CoordinatorEndpoint
from swell.coordinator.ground import ThreadGround
from swell.coordinator.service import CoordinatorService

_DISCOVERY = "discovery"
"""Calls that do not wait for the end of a recovery, on threads of their own: those that do may take
all others, and then no engine would find this coordinator before it has given them up."""


@ray.remote(
    num_cpus=0,
    max_concurrency=16,
    max_restarts=-1,
    max_task_retries=-1,
    concurrency_groups={_DISCOVERY: 4},
)
class Coordinator(CoordinatorService):
    """Knows the members of a cluster; Ray starts it again where it dies. The public methods of the
    service are the actor's; each call runs on a thread of Ray's."""

    def __init__(
        self,
        config: ClusterConfig,
        lockstep: bool,
        endpoint: CoordinatorEndpoint,
        inherited: bool = False,
        namespace: str = "",
    ) -> None:
        """`inherited`: another actor had this endpoint before. `namespace`: of the actor's name;
        Ray gives an actor that of the program that made it."""
        configure_logging()
        self._namespace = namespace
        host = host_address(config.interface, ray.util.get_node_ip_address())
        super().__init__(
            config,
            ThreadGround(host, config.stall_timeout_s, coordinator_ports(config.port_range)),
            lockstep=lockstep,
            endpoint=endpoint.on_host(host),
            recover=inherited or ray.get_runtime_context().was_current_actor_reconstructed,
        )

    @ray.method(concurrency_group=_DISCOVERY)  # type: ignore[untyped-decorator]
    def probe(self) -> bool:
        return super().probe()

    @ray.method(concurrency_group=_DISCOVERY)  # type: ignore[untyped-decorator]
    def contact(self) -> CoordinatorContact:
        name = ray.get_runtime_context().get_actor_name() or ""
        return CoordinatorContact(self.address, self.keys, os.getpid(), name, self._namespace)


def find(known: CoordinatorContact, timeout_s: float) -> CoordinatorContact | None:
    """Where a coordinator is now, as Ray knows it: see `finder.FindCoordinator`. One that is being
    started again is waited for."""
    try:
        actor = ray.get_actor(known.name, namespace=known.namespace)
        contact: CoordinatorContact = ray.get(actor.contact.remote(), timeout=timeout_s)
    except (ValueError, RayError):  # there is none, or it does not answer
        return None
    return contact
