"""The coordinator as a Ray actor: `CoordinatorService` in a process of its own."""

from __future__ import annotations

import os

import ray

from swell.configs.log import configure_logging
from swell.configs.schema import ClusterConfig
from swell.coordinator.contact import CoordinatorContact
from swell.coordinator.ground import ThreadGround
from swell.coordinator.service import CoordinatorEndpoint, CoordinatorService


@ray.remote(num_cpus=0, max_concurrency=16, max_restarts=-1, max_task_retries=-1)
class Coordinator(CoordinatorService):
    """Knows the members of a cluster; Ray starts it again where it dies. The public methods of the
    service are the actor's; each call runs on a thread of Ray's."""

    def __init__(
        self,
        config: ClusterConfig,
        lockstep: bool,
        endpoint: CoordinatorEndpoint,
        inherited: bool = False,
    ) -> None:
        """`inherited`: another actor had this endpoint before."""
        configure_logging()
        super().__init__(
            config,
            ThreadGround(ray.util.get_node_ip_address(), config.stall_timeout_s),
            lockstep=lockstep,
            endpoint=endpoint,
            recover=inherited or ray.get_runtime_context().was_current_actor_reconstructed,
        )

    def contact(self) -> CoordinatorContact:
        return CoordinatorContact(self.address, self.keys, os.getpid())
