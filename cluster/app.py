"""The cluster as a Ray Serve application: Serve owns its life, and no token passes through it.

    Ingress (any number of replicas) --handle, rarely--> Manager (one) --places--> engines

Each ingress replica runs its own HTTP server on a shared port (see `edge.py`); Serve's proxy, where
one runs, reaches the same routes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from swell.cluster.connection import ConnectionLimits
from swell.cluster.coordinator_handle import CoordinatorHandle
from swell.cluster.edge import EdgeServer, claim_port, next_free_port, with_port
from swell.cluster.ingress import Ingress
from swell.cluster.link import EngineLinks
from swell.cluster.manager import ClusterManager, ScaleRefused
from swell.cluster.placement import Placement, resolve_device
from swell.cluster.stored import StoreReply, StoreWish
from swell.configs.log import configure_logging
from swell.configs.process import keep_what_is_here
from swell.configs.schema import Config, ConfigError, load, parse_override
from swell.coordinator.coordinator import CoordinatorContact

_ACTOR_OPTIONS = {"num_cpus": 0}
_SERVE_PROXY_PORT = 8000
"""Where `serve run` starts Serve's proxy."""
_END_S = 20.0
"""What it may take to end engines that have nothing left."""
_HEALTH_CHECKS = 3
"""As many in a row must fail before Serve replaces a replica."""
_SHORTEST_CHECK_S = 3.0
"""A replica that is busy may take so long to answer."""


@serve.deployment(
    name="Manager", num_replicas=1, max_ongoing_requests=1000, ray_actor_options=_ACTOR_OPTIONS
)
class ManagerDeployment:
    """`ClusterManager` under Serve's supervision."""

    async def __init__(self, config: Config) -> None:  # type: ignore[misc]
        configure_logging()
        namespace = f"swell-{serve.get_replica_context().app_name}"
        config = resolve_device(config)
        coordinator = CoordinatorHandle(config, namespace)
        placement = Placement(config, namespace, coordinator)
        self._manager = ClusterManager(config, coordinator, placement)
        await self._manager.start()

    async def check_health(self) -> None:
        """Serve asks in the loop in which the manager runs: one that is stuck does not answer."""

    async def contact(self) -> CoordinatorContact:
        contact = self._manager.contact
        assert contact is not None
        return contact

    async def describe(self) -> dict[str, Any]:
        return await self._manager.describe()

    async def waiting_for(self) -> tuple[str, bool]:
        return await self._manager.waiting_for()

    async def stored(self, wish: StoreWish) -> StoreReply:
        return self._manager.stored(wish)

    async def scale(self, engines: int, drain_timeout_s: float | None) -> str | None:
        """None, or why it is refused; a leading `!` marks a conflict with a running change."""
        return _refusal(lambda: self._manager.scale(engines, drain_timeout_s))

    async def drain(self, rank: int) -> str | None:
        return _refusal(lambda: self._manager.drain(rank))

    async def pause(self) -> str | None:
        try:
            await self._manager.pause()
        except ScaleRefused as refused:
            return _words(refused)
        return None

    async def resume(self) -> str | None:
        await self._manager.resume()
        return None

    async def __del__(self) -> None:
        await self._manager.stop()


@serve.deployment(name="Ingress", max_ongoing_requests=100_000, ray_actor_options=_ACTOR_OPTIONS)
@serve.ingress()
class IngressDeployment:
    """`Ingress` under Serve's supervision, with its own HTTP server."""

    async def __init__(  # type: ignore[misc]
        self, config: Config, manager: DeploymentHandle
    ) -> None:
        configure_logging()
        contact = await manager.contact.remote()
        connect = partial(EngineLinks, contact.address, contact.keys)
        self._ingress = Ingress(config, connect, manager)
        await self._ingress.start()
        self._edge = EdgeServer(
            self._ingress.app,
            config.serve.host,
            config.serve.port,
            config.cluster.drain_timeout_s,
            ConnectionLimits.of(config.serve),
        )
        await self._edge.start()
        keep_what_is_here()

    async def check_health(self) -> None:
        """Serve asks in the loop in which requests are served: one that is stuck does not answer,
        and is replaced. Loops that have ended have ended the process (`configs/process.py`)."""

    def __serve_build_asgi_app__(self) -> Any:
        return self._ingress.app

    async def __del__(self) -> None:
        await self._edge.stop()
        await self._ingress.stop()


def application(config: Config) -> serve.Application:
    """The Serve application of a configuration whose port is known to be usable."""
    manager: Any = ManagerDeployment
    ingress: Any = IngressDeployment
    options = _supervision(config)
    return ingress.options(num_replicas=config.serve.ingress_replicas, **options).bind(
        config, manager.options(**options).bind(config)
    )


def shutdown_s(config: Config) -> float:
    """How long the replicas may take to end: the drain, and the end of what was drained."""
    return config.cluster.drain_timeout_s + _END_S


def _supervision(config: Config) -> dict[str, float]:
    """Serve's limits: a replica that was stopped is replaced after about `stall_timeout_s`."""
    check_s = max(_SHORTEST_CHECK_S, config.cluster.stall_timeout_s / (2 * _HEALTH_CHECKS))
    return {
        "graceful_shutdown_timeout_s": shutdown_s(config),
        "health_check_timeout_s": check_s,
        "health_check_period_s": min(check_s, 10.0),
    }


def build(args: dict[str, Any]) -> serve.Application:
    """For `serve run swell.cluster.app:build config=FILE [section.key=value ...]`.

    Serve's own proxy takes its port and serves the same routes; if `serve.port` is the same, the
    ingresses listen on the next free one.
    """
    args = dict(args)
    source = args.pop("config", None)
    if not source:
        raise ConfigError("say which configuration: serve run swell.cluster.app:build config=FILE")
    config = load(source, dict(parse_override(f"{key}={value}") for key, value in args.items()))
    if config.serve.port == _SERVE_PROXY_PORT:
        config = with_port(config, next_free_port(config.serve.host, _SERVE_PROXY_PORT + 1))
        print(f"Ray Serve's proxy has port {_SERVE_PROXY_PORT}; ours is {config.serve.port}")
    return application(claim_port(config))


def _refusal(change: Any) -> str | None:
    try:
        change()
    except ScaleRefused as refused:
        return _words(refused)
    return None


def _words(refused: ScaleRefused) -> str:
    return ("!" if refused.conflict else "") + str(refused)
