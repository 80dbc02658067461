"""The cluster as a Ray Serve application: Serve starts and stops it, but no tokens pass through
Serve.

    Ingress (any number of replicas) --handle, rarely--> Manager (one) --places--> engines
                                     `-handle--> Store (one)

Each ingress replica runs its own HTTP server on a shared port (`api/server/http_server.py`).
Serve's proxy, if it runs, serves the same routes.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from swell.cluster.api.admin.manager_calls import engine_starts
from swell.cluster.api.admin.protocol import ChangeResult, RequestStory
from swell.cluster.api.ingress import build_ingress
from swell.cluster.api.server.http_server import EdgeServer
from swell.cluster.api.server_info import NotReady
from swell.cluster.api.store.store_service import StoreService
from swell.cluster.api.tracing import exporter as tracing
from swell.cluster.client.engine_core_client import AsyncEngineCoreClient
from swell.cluster.client.requests.request_history import CancelStatus
from swell.cluster.control.engines.placement import Placement
from swell.cluster.control.manager import ClusterManager
from swell.cluster.control.plan.control_state import ScaleRefused
from swell.cluster.control.plan.resources import resolve_device
from swell.cluster.control.ray.checkpoint_store import CheckpointStore
from swell.cluster.control.ray.checkpoint_writer import CheckpointWriter
from swell.cluster.control.ray.coordinator_handle import CoordinatorHandle
from swell.cluster.control.ray.http_port import claim_port, listening_host, with_host, with_port
from swell.cluster.control.ray.ray_cluster import RayCluster
from swell.cluster.control.upgrade_check import (
    Make,
    ModelFileReads,
    cluster_id_of,
    upgraded,
    version_hash,
    with_model_of,
    with_other_weights,
)
from swell.cluster.port_claim import PortClaims
from swell.cluster.replica_peers import ReplicaPeers
from swell.cluster.serve_status import (
    application_owner,
    is_built_again,
    is_deleting,
    is_of_this_ray,
)
from swell.cluster.text.adapters import AdapterRefused
from swell.cluster.text.tokens.tokenizer import import_without_torch
from swell.cluster.watchdog import watch
from swell.configs.config_hash import config_hash
from swell.configs.lora import Adapter
from swell.configs.runtime.log import StructuredLogger, configure_logging
from swell.configs.runtime.network import host_address, ingress_ports
from swell.configs.runtime.process import allow_many_files, freeze_gc
from swell.configs.runtime.secret import SecretText
from swell.configs.schema import ClusterConfig, Config, ConfigError, load, parse_override
from swell.configs.serve import ServeConfig
from swell.configs.sleep_check import sleep_refusal
from swell.coordinator.actor import find
from swell.coordinator.manager_state import Sleep
from swell.coordinator.transport.coordinator_contact import CoordinatorContact
from swell.coordinator.transport.ports import free_port, next_free_port
from swell.coordinator.transport.runtime import ThreadRuntime
from swell.engine.serving.start_timeline import StartPhase

_HEALTH_CHECKS = 3
"""Failed checks in a row after which Serve replaces a replica."""
_SHORTEST_PERIOD_S, _LONGEST_PERIOD_S = 3.0, 10.0
"""Bounds of the time between two checks."""
_UNHEARD_S = 90.0
"""How long Serve's controller waits without hearing from a replica before it kills it. TCP
retransmits within twice the duration of an outage, so an outage of 40 s kills none."""
_OUTLASTS = "RAY_grpc_keepalive_timeout_ms"
_OUTLASTS_MS = "120000"
"""How long a replica keeps a connection whose peer does not answer. With Ray's default of 20 s it
would close during an outage, and Serve would take the following reset for the death of the
replica."""


def replica_options(cluster: ClusterConfig, shutdown_s: float) -> dict[str, Any]:
    """Returns the options with which Ray Serve supervises the replicas of a deployment, which may
    take `shutdown_s` to stop. The watchdog of a replica kills it if it hangs (`watchdog.py`). Serve
    detects dead replicas, and gives up a replica after a long silence: its host may be cut off from
    the controller while clients still reach it."""
    check_s = max(_SHORTEST_PERIOD_S, cluster.stall_timeout_s / (2 * _HEALTH_CHECKS))
    of_actor: dict[str, Any] = {"num_cpus": 0}
    if _OUTLASTS not in os.environ:  # else replicas inherit it from Ray's processes
        of_actor["runtime_env"] = {"env_vars": {_OUTLASTS: _OUTLASTS_MS}}
    return {
        "ray_actor_options": of_actor,
        "graceful_shutdown_timeout_s": shutdown_s,
        "health_check_timeout_s": _UNHEARD_S / _HEALTH_CHECKS,
        "health_check_period_s": min(check_s, _LONGEST_PERIOD_S),
    }


_SERVE_PROXY_PORT = 8000
"""The port on which `serve run` starts Serve's proxy."""
_OTLP_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
"""OpenTelemetry's own variable."""
_STOP_TIMEOUT_S = 20.0
"""Time to stop engines that have no requests left."""
_DRAIN_DELAY_S = 0.1
"""How long Serve waits, for calls through its handles too, before it tells an ingress to stop."""
_DISCOVERY_TIMEOUT_S = 60.0
"""How long an ingress waits for the manager of its own configuration: during a redeployment the
manager of the old configuration may answer."""
_DISCOVERY_POLL_S = 0.2
_SAVE_TIMEOUT_S = 2.0
"""How long a response to an operator may wait until the request is stored in the checkpoint."""


class Contact(msgspec.Struct, frozen=True):
    """The manager's answer to an ingress."""

    coordinator: CoordinatorContact
    port: int
    """The port on which all ingresses of the application listen."""
    config: Config
    """The configuration of the engines, from which an ingress takes the model."""


class IngressStatus(msgspec.Struct, frozen=True):
    """The status of one ingress, as returned through Ray."""

    host: str
    """An address of its host."""
    not_ready: NotReady | None
    """Why the ingress is not ready; None: it reaches an engine that can make progress."""


class ManagerDeployment:
    """`ClusterManager` under Serve's supervision."""

    async def __init__(self, config: Config, cluster_id: str) -> None:  # type: ignore[misc]
        """`cluster_id`: see `configs/config_hash.py`."""
        configure_logging()
        self._log = StructuredLogger("cluster.app")
        self._app = serve.get_replica_context().app_name
        namespace = f"swell-{self._app}"
        self._cluster_id, given = cluster_id, config_hash(config)
        self._reads = ModelFileReads()
        self._ports = ingress_ports(config.cluster.port_range)
        self._serve = with_host(config, ray.util.get_node_ip_address()).serve
        cluster, runtime = RayCluster(config.cluster), ThreadRuntime()
        self._checkpoints = CheckpointStore(namespace, cluster_id, cluster)
        self._resources = cluster.total_resources
        config = resolve_device(config, self._resources())
        writer = CheckpointWriter(self._checkpoints, config, runtime)
        self._coordinator = CoordinatorHandle(
            config, namespace, self._checkpoints, cluster, writer.manager_id
        )
        placement = Placement(
            config, namespace, self._coordinator, cluster, runtime, writer.confirm_leader
        )
        self._manager = ClusterManager(config, self._coordinator, placement, writer, runtime, given)
        await self._manager.start()
        watch("the manager", config.cluster.stall_timeout_s)

    async def check_health(self) -> None:
        """Called by Serve. The watchdog kills a manager that hangs. A manager that no longer leads
        is unhealthy, so Serve replaces it, unless Serve is stopping it anyway. Its successor may be
        gone: perhaps it hung during its start, and took over late."""
        if not self._manager.leads:
            raise RuntimeError("another manager has taken over from this one")

    async def contact(self, wanted: str) -> Contact | None:
        """Returns the contact of the cluster; None: this manager manages a cluster with
        another id."""
        if wanted != self._cluster_id:
            return None
        contact = self._coordinator.contact
        assert contact is not None
        host, port = self._serve.host, self._serve.port
        choose = partial(free_port, host, self._ports)
        config = self._manager.upgrader.serving.config
        return Contact(contact, port or await self._checkpoints.port(choose), config)

    async def describe(self) -> dict[str, Any]:
        return await self._manager.describe()

    async def not_ready_reason(self) -> tuple[str, bool]:
        return await self._manager.not_ready_reason()

    async def scale(self, engines: int, drain_timeout_s: float | None) -> ChangeResult:
        return await self._change(lambda: self._manager.scale(engines, drain_timeout_s))

    async def drain(self, rank: int) -> ChangeResult:
        return await self._change(lambda: self._manager.drain(rank))

    async def upgrade(self, settings: dict[str, Any]) -> ChangeResult:
        """`settings`: a configuration, as sections of keys."""
        return await self._begin_version(upgraded, settings)

    async def update_weights(self, path: str) -> ChangeResult:
        return await self._begin_version(with_other_weights, path, in_place=True)

    async def _begin_version(
        self, make: Make, wanted: Any, *, in_place: bool = False
    ) -> ChangeResult:
        manager = self._manager
        try:
            given, kept = await self._reads.run(make, manager.upgrader.wanted.config, wanted)
            config = resolve_device(given, await asyncio.to_thread(self._resources))
            name = config_hash(config)
            if not in_place:
                name = version_hash(given, config, manager.upgrader.record.versions)
            await manager.upgrade(name, config, in_place=in_place)
        except ScaleRefused as refused:
            return ChangeResult(manager.target, str(refused))
        return ChangeResult(manager.target, kept=kept, version=manager.upgrader.wanted.name)

    async def load_adapter(self, adapter: Adapter, in_place: bool) -> ChangeResult:
        return await self._change(lambda: self._manager.adapters.load(adapter, in_place))

    async def unload_adapter(self, name: str) -> ChangeResult:
        return await self._change(lambda: self._manager.adapters.unload(name))

    async def pause(self) -> ChangeResult:
        return await self._change(self._manager.pause)

    async def sleep(self, level: int, requests: str) -> ChangeResult:
        if (refusal := sleep_refusal(self._manager.upgrader.wanted.config, level)) is not None:
            return ChangeResult(self._manager.target, refusal)
        sleep = Sleep(level, refuses=requests == "refuse")
        return await self._change(lambda: self._manager.pause(sleep))

    async def wake(self) -> ChangeResult:
        return await self.resume()

    async def resume(self) -> ChangeResult:
        return await self._change(self._manager.resume)

    async def reset_prefix_cache(self) -> ChangeResult:
        return await self._change(self._manager.reset_prefix_cache)

    async def _change(self, change: Callable[[], Awaitable[None] | None]) -> ChangeResult:
        """Makes a change. Once it is in the manager's state it takes effect, also while Ray's GCS
        does not answer; the result says whether it is stored in the checkpoint, too."""
        try:
            if (under_way := change()) is not None:
                await under_way
            is_stored = await self._save()
        except (ScaleRefused, AdapterRefused) as refused:
            return ChangeResult(self._manager.target, str(refused))
        return ChangeResult(self._manager.target, is_stored=is_stored)

    async def _save(self) -> bool:
        """Stores the request. Returns False if the store does not answer in time: the manager
        stores the request later. Raises ScaleRefused if another manager has taken over."""
        try:
            await asyncio.wait_for(self._manager.save(), _SAVE_TIMEOUT_S)
        except ScaleRefused:
            raise
        except Exception as error:
            self._log.warning("checkpoint not written", error=f"{type(error).__name__}: {error}")
            return False
        return True

    async def __del__(self) -> None:
        if await is_deleting(self._app):
            await self._manager.stop()
        else:
            await self._manager.leave()


@serve.ingress()
class IngressDeployment:
    """`Ingress` under Serve's supervision, with its own HTTP server."""

    async def __init__(  # type: ignore[misc]
        self,
        config: Config,
        cluster_id: str,
        manager: DeploymentHandle,
        store: DeploymentHandle | None,
    ) -> None:
        configure_logging()
        import_without_torch()
        contact = await _discover_manager(manager, cluster_id)
        config = with_model_of(config, contact.config)
        node = ray.util.get_node_ip_address()
        self._host = host_address(config.cluster.interface, node)
        config = with_host(config, node)
        self._app = serve.get_replica_context().app_name
        owner = application_owner(self._app)
        # The parent of Ray's workers is the raylet.
        self._claim = PortClaims().claim(config.serve.host, contact.port, owner, os.getppid())
        found = contact.coordinator
        allow_many_files()
        runtime = ThreadRuntime(silence_s=config.cluster.stall_timeout_s)
        connect = partial(
            AsyncEngineCoreClient,
            found.address,
            found.keys,
            runtime=runtime,
            find=partial(find, found, config.cluster.stall_timeout_s),
        )
        peers = ReplicaPeers(config.serve.ingress_replicas or 1)
        self._ingress = await build_ingress(config, connect, manager, store, peers)
        limits, drain_s = config.serve, config.cluster.drain_timeout_s
        self._edge = EdgeServer(self._ingress.app, limits.host, contact.port, drain_s, limits)
        await self._edge.start()
        StructuredLogger("cluster.app").info("listening", host=limits.host, port=contact.port)
        freeze_gc()
        watch("the ingress", config.cluster.stall_timeout_s)

    async def status(self) -> IngressStatus:
        """Returns the status for the command that starts the application, which may run where it
        cannot reach an ingress."""
        return IngressStatus(self._host, await self._ingress.not_ready())

    async def engine_starts(self) -> dict[int, list[StartPhase]]:
        """Returns the phases of the engines' starts by rank, for the same command."""
        return await engine_starts(self._ingress.services.manager)

    async def find_requests(self, id: str, asking: int) -> list[RequestStory]:
        """Returns what this ingress knows of a request, for another ingress."""
        return self._ingress.find_requests(id, asking)

    async def cancel_requests(
        self, ids: list[str], owner: SecretText, asking: int
    ) -> dict[str, CancelStatus]:
        """Cancels requests of a user at this ingress, for another ingress."""
        return self._ingress.cancel_requests(ids, owner, asking)

    async def check_health(self) -> None:
        """Called by Serve. The watchdog kills an ingress that hangs; an ingress whose loops have
        failed has already exited (`configs/runtime/process.py`)."""
        self._claim.renew()

    def __serve_build_asgi_app__(self) -> Any:
        return self._ingress.app

    async def __del__(self) -> None:
        self._ingress.begin_drain()
        await self._edge.stop(self._ingress.end_requests)
        self._claim.release(ends=await is_deleting(self._app))
        await self._ingress.stop()


class StoreDeployment(StoreService):
    """`StoreService` under Serve's supervision."""

    async def __init__(  # type: ignore[misc]
        self, limits: ServeConfig, stall_timeout_s: float
    ) -> None:
        super().__init__(limits)
        watch("the store", stall_timeout_s)

    async def check_health(self) -> None:
        """Called by Serve. The watchdog kills a store that hangs, and Serve replaces it."""


async def _discover_manager(manager: DeploymentHandle, wanted: str) -> Contact:
    """Finds the manager. Raises TimeoutError; Serve then tries another replica."""
    async with asyncio.timeout(_DISCOVERY_TIMEOUT_S):
        while True:
            contact: Contact | None = await manager.contact.remote(wanted)
            if contact is not None:
                return contact
            await asyncio.sleep(_DISCOVERY_POLL_S)


def application(config: Config) -> serve.Application:
    """Returns the Serve application of a configuration with a usable port. If the port is 0, the
    manager chooses one, which the application keeps.

    Stored responses and sessions have their own process: large bodies pass through neither the
    manager nor the coordinator, and the process loads only the store.
    """
    hosts = _hosts()
    config = with_collector(_with_ingresses(config, hosts))
    limits, options = config.serve, replica_options(config.cluster, shutdown_s(config))
    one = {"num_replicas": 1, "max_ongoing_requests": 1000, **options}
    many = {
        "num_replicas": limits.ingress_replicas,
        "max_ongoing_requests": 100_000,
        "graceful_shutdown_wait_loop_s": _DRAIN_DELAY_S,
        **options,
    }
    if hosts > 1:  # otherwise Serve may place all of them on one node
        many["max_replicas_per_node"] = -(-(limits.ingress_replicas or 1) // hosts)
    cluster_id = cluster_id_of(config)
    manager = serve.deployment(name="Manager", **one)(ManagerDeployment).bind(config, cluster_id)
    store = None
    if limits.stored_responses or limits.sessions:
        stall_s = config.cluster.stall_timeout_s
        store = serve.deployment(name="Store", **one)(StoreDeployment).bind(limits, stall_s)
    return serve.deployment(name="Ingress", **many)(IngressDeployment).bind(
        config, cluster_id, manager, store
    )


def _hosts() -> int:
    """Returns the number of nodes of the Ray cluster; 1 if this process is not connected to one."""
    nodes = ray.nodes() if ray.is_initialized() else []
    return max(1, len([node for node in nodes if node["Alive"]]))


def _with_ingresses(config: Config, hosts: int) -> Config:
    """Returns the configuration with the number of ingresses: by default one per host."""
    number = config.serve.ingress_replicas or hosts
    serve = msgspec.structs.replace(config.serve, ingress_replicas=number)
    return msgspec.structs.replace(config, serve=serve)


def with_collector(config: Config) -> Config:
    """Returns the configuration with the OTLP collector from this command's environment, unless one
    is configured: ingresses may run on other hosts. Raises ConfigError if a collector is configured
    and OpenTelemetry's exporter is not installed."""
    endpoint = os.environ.get(_OTLP_ENDPOINT)
    if config.serve.otlp_endpoint is not None:
        if not tracing.is_installed():
            raise ConfigError(
                "serve.otlp_endpoint needs OpenTelemetry's exporter, which is not installed: "
                f"{tracing.INSTALL}"
            )
        return config
    if not endpoint:
        return config
    if not tracing.is_installed():  # the variable may be for other programs
        note = f"no traces are exported: {_OTLP_ENDPOINT} is set, and needs {tracing.INSTALL}"
        print(note, file=sys.stderr)
        return config
    serve = {**msgspec.to_builtins(config.serve), "otlp_endpoint": endpoint}
    return load({**msgspec.to_builtins(config), "serve": serve})


def shutdown_s(config: Config) -> float:
    """Returns how long the replicas may take to stop: the drain, and stopping the drained
    engines."""
    return config.cluster.drain_timeout_s + _STOP_TIMEOUT_S


def build(args: dict[str, Any]) -> serve.Application:
    """Entry point of `serve run swell.cluster.app:build config=FILE [section.key=value ...]`.

    Serve's own proxy takes its port and serves the same routes; if `serve.port` is the same, the
    ingresses listen on the next free one.
    """
    args = dict(args)
    source = args.pop("config", None)
    if not source:
        raise ConfigError("config is missing; run: serve run swell.cluster.app:build config=FILE")
    config = load(source, dict(parse_override(f"{key}={value}") for key, value in args.items()))
    node = ray.util.get_node_ip_address()
    if config.serve.port == _SERVE_PROXY_PORT:
        host = listening_host(config, node)
        config = with_port(config, next_free_port(host, _SERVE_PROXY_PORT + 1))
        print(
            f"Ray Serve's proxy uses port {_SERVE_PROXY_PORT}, so the ingresses listen on port "
            f"{config.serve.port}"
        )
    if config.serve.port and not is_built_again():
        config = claim_port(config, node)
        PortClaims().check(listening_host(config, node), config.serve.port, is_of_this_ray)
    return application(config)
