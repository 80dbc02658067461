"""Interface of the control plane to Ray.

`ray_cluster.py` implements it with the real Ray, and the simulator (`tests/simulator/`) with
tables. `tests/cluster/control/ray/test_ray_contract.py` checks both against these docstrings.

Actor names are unique in a namespace, names of placement groups in the whole Ray cluster. Ray
terminates both asynchronously. The death of an actor does not remove its placement group, which
keeps its resources. Removing a group terminates the actors in it.

Coroutines raise `GcsUnavailable`, a TimeoutError, if Ray's GCS (its control store) does not answer
for some seconds. After that, or after a cancellation, the requested action may still happen, but a
change never happens after a later change or listing of this process. Plain methods block while the
GCS is unavailable.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, Protocol

from swell.configs.schema import ClusterConfig, Config
from swell.coordinator.transport.coordinator_contact import CoordinatorEndpoint

Actor = Any
"""A reference to an actor. Only the port that made it reads it."""
Group = Any
"""A reference to a placement group. `EngineActor.start` accepts one as an argument."""


class RayInterface(Protocol):
    """Ray, as seen by one process."""

    # ---------------------------------------------------------------- this host

    @property
    def node_id(self) -> str:
        """The id of this process's node, as in `EngineReady.node`."""

    def new_endpoint(self) -> CoordinatorEndpoint:
        """Returns new keys, a new name and a free port of this host, for a coordinator."""

    async def save_hang_report(self, title: str, pid: int, node: str) -> str:
        """Saves the state of a process that hangs, and of its workers on the same node, in a file
        on this host, and returns `HOST:PATH`; an empty string if that is not possible."""

    async def kill_process(self, pid: int, node: str) -> None:
        """Kills a process of a node and returns when its memory is free. It is not an error if the
        process is already dead. On another node a helper does it. Raises an `ActorError` if no
        helper can."""

    # ---------------------------------------------------------------- resources

    def total_resources(self) -> dict[str, float]:
        """Total resources of all nodes that are alive, by kind. Kinds with an amount of 0 may be
        missing."""

    async def node_resources(self) -> list[dict[str, float]]:
        """Total resources of each node that is alive. A bundle of a group must fit on one node."""

    async def draining_nodes(self) -> dict[str, float]:
        """Nodes that will be taken away: id -> seconds until then, 0 if that time has passed,
        infinite if it is unknown. Ray places no group on these nodes."""

    async def free_resources(self) -> dict[str, float]:
        """Resources of all nodes that no group or actor has reserved."""

    # ---------------------------------------------------------------- placement groups

    async def create_group(self, name: str, bundle: Mapping[str, float], count: int) -> Group:
        """Reserves `count` bundles, each on one node, and as close together as possible. The group
        outlives its creator and waits until its resources are free. Raises RuntimeError if the name
        is taken."""

    async def wait_for_group(self, group: Group, timeout_s: float) -> bool:
        """Waits for the resources of a group. Returns whether all of them are reserved."""

    async def remove_group(self, group: Group) -> None:
        """Starts to remove a group. It is not an error if the group was removed before."""

    async def groups(self) -> dict[str, Group]:
        """Returns all groups by name, sorted, except removed ones."""

    # ---------------------------------------------------------------- actors

    async def actor_names(self, namespace: str) -> list[str]:
        """Returns the sorted names of all actors that are not dead, including those that wait for
        resources or are restarting. The name of a killed actor disappears at once, although its
        process may live for some seconds."""

    async def find_actor(self, name: str, namespace: str) -> Actor | None:
        """Returns an actor by name; None: it is dead, or never existed."""

    async def create_engine(
        self,
        name: str,
        namespace: str,
        group: Group,
        num_gpus: float,
        config: Config,
        rank: int,
        version: str,
    ) -> Actor:
        """Creates an `EngineActor` in the first bundle of the group; Ray never restarts it. Raises
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
        """Returns the coordinator with this name. If none exists, creates it on this node, or on
        another one if this node is lost. Ray restarts it whenever it dies, and then runs unfinished
        calls again from the beginning."""

    def call(self, actor: Actor, method: str, *args: Any) -> Awaitable[Any]:
        """Sends a call at once. The awaitable may be awaited once or never; cancelling the wait
        does not cancel the call. Awaiting raises an `ActorError`, and never times out."""

    async def kill(self, actor: Actor, *, restart: bool = False) -> None:
        """Kills an actor without its own clean-up. `restart`: Ray restarts it, if it can be
        restarted. It is not an error if the actor is already dead."""

    # ---------------------------------------------------------------- the GCS's key-value store

    async def kv_get(self, key: bytes) -> bytes | None: ...

    async def kv_put(self, key: bytes, value: bytes, *, overwrite: bool = True) -> bool:
        """Stores a value. Returns whether it was written: False if the key exists and `overwrite`
        is False. After `GcsUnavailable` the value may still be written, but never after a later
        write of this process."""

    async def kv_keys(self, prefix: bytes) -> list[bytes]:
        """Returns all keys with this prefix, sorted."""

    async def kv_delete(self, prefix: bytes) -> None:
        """Deletes all keys with this prefix, in order with `kv_put`."""
