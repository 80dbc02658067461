"""Implements `RayInterface` with the real Ray: the only file of the control plane that imports it.
No decisions."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import ray
from ray.exceptions import (
    ActorUnavailableError,
    RayActorError,
    RayError,
    RaySystemError,
    RayTaskError,
)
from ray.experimental import internal_kv
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from swell.cluster.control.ray.actor_errors import (
    ActorDied,
    ActorError,
    ActorRaised,
    ActorUnavailable,
    GcsUnavailable,
)
from swell.cluster.control.ray.ray_interface import Actor
from swell.configs.runtime.network import coordinator_ports, host_address
from swell.configs.schema import ClusterConfig, Config
from swell.coordinator.actor import Coordinator
from swell.coordinator.transport.channel import make_keys
from swell.coordinator.transport.coordinator_contact import CoordinatorEndpoint
from swell.coordinator.transport.ports import free_port
from swell.engine.executor.hang_report import save_report_of_process
from swell.engine.executor.process_killer import kill_process
from swell.engine.serving.actor import EngineActor

T = TypeVar("T")

_KV_NAMESPACE = b"swell"
_REMOVED = "REMOVED"
_GCS_TIMEOUT_S = 10.0
"""How long Ray's GCS may take to answer."""
_NAME_BYTES = 8
_RESERVED = "CREATED"
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.01, 0.5
"""Delays between two checks of a placement group."""


class RayCluster:
    """The Ray cluster to which this process is connected. `RayInterface` specifies the methods."""

    engine_class: Any = EngineActor
    coordinator_class: Any = Coordinator

    def __init__(self, config: ClusterConfig | None = None) -> None:
        """`config`: says where a coordinator listens."""
        self._config = config or ClusterConfig()
        self._changes = ThreadPoolExecutor(1, thread_name_prefix="swell-ray-changes")
        """One thread, so that a change which the GCS has not answered yet precedes all later
        changes and listings."""

    # ---------------------------------------------------------------- this host

    @property
    def node_id(self) -> str:
        found: str = ray.get_runtime_context().get_node_id()
        return found

    def new_endpoint(self) -> CoordinatorEndpoint:
        host = host_address(self._config.interface, ray.util.get_node_ip_address())
        port = free_port(host, coordinator_ports(self._config.port_range))
        return CoordinatorEndpoint(make_keys(), secrets.token_hex(_NAME_BYTES), port, host)

    async def save_hang_report(self, title: str, pid: int, node: str) -> str:
        return await asyncio.to_thread(save_report_of_process, title, pid, node)

    async def kill_process(self, pid: int, node: str) -> None:
        try:
            await asyncio.to_thread(kill_process, pid, node)
        except RayError as error:
            raise _translate(error) from None

    # ---------------------------------------------------------------- resources

    def total_resources(self) -> dict[str, float]:
        return dict(ray.cluster_resources())

    async def node_resources(self) -> list[dict[str, float]]:
        nodes = await _call_gcs(ray.nodes)
        return [dict(node["Resources"]) for node in nodes if node["Alive"]]

    async def draining_nodes(self) -> dict[str, float]:
        gcs = ray._private.worker.global_worker.gcs_client
        deadlines_ms = await _call_gcs(partial(gcs.get_draining_nodes, timeout=_GCS_TIMEOUT_S))
        alive = {node["NodeID"] for node in await _call_gcs(ray.nodes) if node["Alive"]}
        return {
            node: max(0.0, at_ms / 1000 - time.time()) if at_ms else math.inf
            for node, at_ms in deadlines_ms.items()
            if node in alive
        }

    async def free_resources(self) -> dict[str, float]:
        return dict(await _call_gcs(ray.available_resources))

    # ---------------------------------------------------------------- placement groups

    async def create_group(
        self, name: str, bundle: Mapping[str, float], count: int
    ) -> PlacementGroup:
        bundles = [dict(bundle) for _ in range(count)]
        try:
            return await self._change(
                partial(placement_group, bundles, strategy="PACK", name=name, lifetime="detached")
            )
        except RaySystemError as error:
            raise RuntimeError(str(error)) from None

    async def wait_for_group(self, group: PlacementGroup, timeout_s: float) -> bool:
        """Polls with short calls: many groups may wait for a long time, and threads are few."""
        deadline, pause_s = time.monotonic() + timeout_s, _FIRST_LOOK_S
        while not await _call_gcs(partial(_is_reserved, group)):
            if time.monotonic() + pause_s > deadline:
                return False
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
        return True

    async def remove_group(self, group: PlacementGroup) -> None:
        await self._change(partial(remove_placement_group, group))

    async def groups(self) -> dict[str, PlacementGroup]:
        table = await self._change(placement_group_table)
        ids = {row["name"]: key for key, row in table.items() if row["state"] != _REMOVED}
        return {
            name: PlacementGroup(ray.PlacementGroupID(bytes.fromhex(ids[name])))
            for name in sorted(ids)
        }

    # ---------------------------------------------------------------- actors

    async def actor_names(self, namespace: str) -> list[str]:
        found = await self._change(partial(ray.util.list_named_actors, all_namespaces=True))
        return sorted(actor["name"] for actor in found if actor["namespace"] == namespace)

    async def find_actor(self, name: str, namespace: str) -> Actor | None:
        with contextlib.suppress(ValueError):
            return await _call_gcs(partial(ray.get_actor, name, namespace=namespace))
        return None

    async def create_engine(
        self,
        name: str,
        namespace: str,
        group: PlacementGroup,
        num_gpus: float,
        config: Config,
        rank: int,
        version: str,
    ) -> Actor:
        placed = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        options = self.engine_class.options(
            name=name,
            namespace=namespace,
            lifetime="detached",
            num_gpus=num_gpus,
            scheduling_strategy=placed,
        )
        return await self._change(partial(options.remote, config, rank, version))

    async def get_or_create_coordinator(
        self,
        name: str,
        namespace: str,
        config: ClusterConfig,
        lockstep: bool,
        endpoint: CoordinatorEndpoint,
        inherited: bool,
    ) -> Actor:
        options = self.coordinator_class.options(
            name=name,
            namespace=namespace,
            lifetime="detached",
            get_if_exists=True,
            scheduling_strategy=NodeAffinitySchedulingStrategy(self.node_id, soft=True),
        )
        create = partial(options.remote, config, lockstep, endpoint, inherited, namespace)
        return await self._change(create)

    def call(self, actor: Any, method: str, *args: Any) -> Awaitable[Any]:
        return _Answer(getattr(actor, method).remote(*args))

    async def kill(self, actor: Actor, *, restart: bool = False) -> None:
        await self._change(partial(ray.kill, actor, no_restart=not restart))

    # ---------------------------------------------------------------- the GCS's key-value store

    async def kv_get(self, key: bytes) -> bytes | None:
        value: bytes | None = await _call_gcs(_kv(internal_kv._internal_kv_get, key))
        return value

    async def kv_put(self, key: bytes, value: bytes, *, overwrite: bool = True) -> bool:
        put = _kv(internal_kv._internal_kv_put, key, value, overwrite)
        was_there = await self._change(put)
        return overwrite or not was_there

    async def kv_keys(self, prefix: bytes) -> list[bytes]:
        return sorted(await _call_gcs(_kv(internal_kv._internal_kv_list, prefix)))

    async def kv_delete(self, prefix: bytes) -> None:
        delete = _kv(partial(internal_kv._internal_kv_del, del_by_prefix=True), prefix)
        await self._change(delete)

    async def _change(self, call: Callable[[], T]) -> T:
        return await _call_gcs(call, self._changes)


class _Answer:
    """The result of a call that was sent, with our exceptions instead of Ray's."""

    def __init__(self, reference: Any) -> None:
        self._reference = reference

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        try:
            return await self._reference
        except RayError as error:
            raise _translate(error) from None


def _translate(error: RayError) -> ActorError:
    if isinstance(error, RayTaskError):
        cause: BaseException | None = error.cause
        while isinstance(cause, RayTaskError):  # the method raised this for a call of its own
            cause = cause.cause
        if cause is None:  # the call could not be sent
            cause = ActorError(str(error))
        return ActorRaised(_translate(cause) if isinstance(cause, RayError) else cause)
    if isinstance(error, ActorUnavailableError):
        return ActorUnavailable(str(error))
    if isinstance(error, RayActorError):
        return ActorDied(str(error))
    return ActorError(f"{type(error).__name__}: {error}")


def _is_reserved(group: PlacementGroup) -> bool:
    return bool(placement_group_table(group).get("state") == _RESERVED)


def _kv(function: Callable[..., T], *args: object) -> Callable[[], T]:
    return partial(function, *args, namespace=_KV_NAMESPACE)


async def _call_gcs(call: Callable[[], T], thread: Executor | None = None) -> T:
    """Runs a call that blocks while the GCS is unavailable. After a timeout the thread keeps
    running."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_GCS_TIMEOUT_S):
            return await loop.run_in_executor(thread, call)
    except TimeoutError:
        text = f"Ray's GCS did not answer within {_GCS_TIMEOUT_S:g} s"
        raise GcsUnavailable(text) from None
