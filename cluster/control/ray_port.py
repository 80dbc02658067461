"""All that the control plane needs of Ray, as an interface.

`ray_cluster.py` implements it on the real Ray, and the simulator (`tests/simulator/`) on tables;
`tests/cluster/control/test_ray_contract.py` holds both to what is written here.

Names of actors are unique in a namespace, those of placement groups in the whole Ray cluster. Ray
ends both asynchronously, and neither ends the
other: an actor that dies leaves its group behind, with all that the group reserves. Actors in a
group that is removed end with it.

Coroutines raise `GcsUnavailable`, a TimeoutError, if Ray's GCS (its control store) does not answer
for some seconds; so they do if they are cancelled: what was to be done may be done yet, but what
changes something never after a later change or listing of this process. Plain methods block while
the GCS is away.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, Protocol

from swell.configs.schema import ClusterConfig, Config
from swell.coordinator.contact import CoordinatorContact, CoordinatorEndpoint

Actor = Any
"""A reference to an actor. Only the port that made it reads it."""
Group = Any
"""The same for a placement group. `EngineActor.start` takes one as an argument."""


class RayPort(Protocol):
    """Ray, as one process sees it."""

    # ---------------------------------------------------------------- this host

    @property
    def node_id(self) -> str:
        """Of this process's node, as `EngineReady.node` has it."""

    def new_endpoint(self) -> CoordinatorEndpoint:
        """New keys, a new name, and a port that is free here, for a coordinator."""

    async def kill_process(self, pid: int, node: str) -> None:
        """End a process of a node, and return when its memory is free; one that has ended is no
        error. On another node a helper does it. Raises an `ActorError` if none can."""

    # ---------------------------------------------------------------- resources

    def total_resources(self) -> dict[str, float]:
        """Of all nodes that are alive, by kind; empty kinds may be missing."""

    async def node_resources(self) -> list[dict[str, float]]:
        """The same of each node; a bundle of a group must fit on one of them."""

    async def draining_nodes(self) -> dict[str, float]:
        """Nodes that will be taken away, by id: seconds until they are, 0 if that time is over,
        infinite if it is not known. Ray places no group on them."""

    async def free_resources(self) -> dict[str, float]:
        """What of them no group or actor has reserved."""

    # ---------------------------------------------------------------- placement groups

    async def create_group(self, name: str, bundle: Mapping[str, float], count: int) -> Group:
        """Reserve `count` bundles, each on one node, and as close together as possible. The group
        outlives its maker, and waits until its resources are free. Raises RuntimeError if the
        name is taken."""

    async def wait_for_group(self, group: Group, timeout_s: float) -> bool:
        """Whether all of its resources are reserved, after waiting for them."""

    async def remove_group(self, group: Group) -> None:
        """Begin to remove it; one that was removed is no error."""

    async def groups(self) -> dict[str, Group]:
        """Every group but those that were removed, by name; names are sorted."""

    # ---------------------------------------------------------------- actors

    async def actor_names(self, namespace: str) -> list[str]:
        """Of every actor that is not dead: one that waits for resources, or is being restarted,
        too. Sorted. The name of an actor that was killed is missing at once, although its process
        may last for some seconds."""

    async def find_actor(self, name: str, namespace: str) -> Actor | None:
        """None: it has ended, or there was none."""

    async def create_engine(
        self,
        name: str,
        namespace: str,
        group: Group,
        num_gpus: float,
        config: Config,
        rank: int,
        coordinator: CoordinatorContact,
        version: str,
    ) -> Actor:
        """An `EngineActor` in the first bundle of the group; it is never started again. Raises
        ValueError if the name is taken."""

    async def get_or_create_coordinator(
        self,
        name: str,
        namespace: str,
        config: ClusterConfig,
        lockstep: bool,
        endpoint: CoordinatorEndpoint,
        inherited: bool,
    ) -> Actor:
        """The coordinator of this name. If there is none, one is created on this node, or on
        another one if this node is lost; it is started again whenever it dies, and calls that were
        under way then run again, from their beginning."""

    def call(self, actor: Actor, method: str, *args: Any) -> Awaitable[Any]:
        """Send a call at once. The awaitable may be awaited once, or never; to cancel the wait
        does not cancel the call. Raises an `ActorError`, and has no deadline of its own."""

    async def kill(self, actor: Actor, *, restart: bool = False) -> None:
        """End an actor, without a clean-up of its own. `restart`: it starts again if it is one
        that does. One that has ended is no error."""

    # ---------------------------------------------------------------- the GCS's key-value store

    async def kv_get(self, key: bytes) -> bytes | None: ...

    async def kv_put(self, key: bytes, value: bytes, *, overwrite: bool = True) -> bool:
        """Returns whether the value was written: False if the key was there and is not to be
        overwritten. After `GcsUnavailable` it may be written yet, but never after a later write of
        this process."""

    async def kv_keys(self, prefix: bytes) -> list[bytes]:
        """Every key that begins so. Sorted."""

    async def kv_delete(self, prefix: bytes) -> None:
        """Delete every key that begins so, in order with `kv_put`."""
