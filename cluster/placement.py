"""Ray's part of an engine's life: placement groups, actors, names. No decisions."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

import msgspec
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from swell.configs.log import FactLogger
from swell.configs.schema import Config, ConfigError
from swell.coordinator.coordinator import Coordinator, CoordinatorContact
from swell.coordinator.roster import Member, MemberState
from swell.coordinator.wire import ClusterView
from swell.engine.actor import EngineActor, EngineReady

_WATCH_S = 20.0
"""How long one look at the end of an engine takes: a manager that dies leaves no thread behind."""
_STOP_S = 5.0
"""How long an engine may take to end by itself before it is killed."""


class StartFailed(RuntimeError):
    """An engine did not come up. `permanent`: it would fail again in the same way."""

    def __init__(self, message: str, *, permanent: bool) -> None:
        super().__init__(message)
        self.permanent = permanent


@dataclass
class EngineHandle:
    """One engine that was placed, or is about to be."""

    rank: int
    actor: Any = None
    group: Any = None
    ready: EngineReady | None = None
    leaving: bool = False
    watcher: asyncio.Task[None] | None = None

    @property
    def member(self) -> Member:
        """The engine as the roster lists it."""
        assert self.ready is not None
        limits = self.ready.limits
        return Member(
            self.rank,
            self.ready.address,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
        )

    async def doing(self) -> str:
        if self.actor is None:
            return "waiting for resources"
        try:
            text: str = await asyncio.wait_for(self.actor.doing.remote(), 2)
            return text
        except (TimeoutError, ray.exceptions.RayError):
            return "starting a process"


class Placement:
    """Actors of one cluster, detached and named, so that a new manager finds them again."""

    def __init__(self, config: Config, namespace: str) -> None:
        self._config = config
        self._namespace = namespace
        self._coordinator: Any = None
        self._log = FactLogger("cluster.placement")
        self.contact: CoordinatorContact | None = None

    @property
    def coordinator_pid(self) -> int | None:
        return self.contact.pid if self.contact else None

    async def open(self) -> None:
        """Find the coordinator, or make it."""
        kind: Any = Coordinator
        self._coordinator = kind.options(
            name="coordinator",
            namespace=self._namespace,
            lifetime="detached",
            get_if_exists=True,
        ).remote(self._config.cluster)
        self.contact = await self._coordinator.contact.remote()

    async def view(self) -> ClusterView:
        view: ClusterView = await self._coordinator.view.remote()
        return view

    async def join(self, members: list[Member]) -> None:
        roster = await self._coordinator.join.remote(members)
        self._log.info("joined", epoch=roster.epoch, ranks=[member.rank for member in members])

    async def leave(self, ranks: list[int]) -> None:
        roster = await self._coordinator.leave.remote(ranks)
        self._log.info("leaving", epoch=roster.epoch, ranks=ranks)

    async def remove(self, ranks: list[int]) -> None:
        roster = await self._coordinator.remove.remote(ranks)
        self._log.info("removed", epoch=roster.epoch, ranks=ranks)

    async def adopt(self) -> list[EngineHandle]:
        """Engines in the coordinator's roster that live. Others, which an earlier manager was
        starting or ending, are ended."""
        handles: list[EngineHandle] = []
        for member in (await self.view()).roster.members:
            name = self._engine_name(member.rank)
            try:
                actor = ray.get_actor(name, namespace=self._namespace)
                ready = await actor.ready.remote()
                group = ray.util.get_placement_group(name)
            except (ValueError, ray.exceptions.RayError):
                await self.remove([member.rank])
                continue
            leaving = member.state is MemberState.LEAVING
            handles.append(EngineHandle(member.rank, actor, group, ready, leaving))
        self._end_strays({self._engine_name(handle.rank) for handle in handles})
        return handles

    def _end_strays(self, adopted: set[str]) -> None:
        for actor in ray.util.list_named_actors(all_namespaces=True):
            name = actor["name"]
            if actor["namespace"] != self._namespace or name in adopted | {"coordinator"}:
                continue
            self._log.warning("stray engine ended", name=name)
            stray = EngineHandle(-1, ray.get_actor(name, namespace=self._namespace))
            with contextlib.suppress(ValueError):
                stray.group = ray.util.get_placement_group(name)
            _destroy(stray)

    def plan(self, rank: int) -> EngineHandle:
        return EngineHandle(rank)

    async def start(self, handle: EngineHandle) -> None:
        """Reserve resources, start the processes, load. Raises StartFailed and leaves nothing."""
        try:
            async with asyncio.timeout(self._config.cluster.start_timeout_s):
                await self._start(handle)
        except BaseException as error:
            await self.end(handle)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise _explain(error, handle.rank, self._config) from error

    async def _start(self, handle: EngineHandle) -> None:
        assert self.contact is not None
        bundles = [self._bundle()] * self._config.parallel.world
        name = self._engine_name(handle.rank)
        handle.group = placement_group(bundles, strategy="PACK", name=name, lifetime="detached")
        await handle.group.ready()
        in_process = self._config.parallel.executor == "inproc" or (
            self._config.parallel.executor == "auto" and self._config.parallel.world == 1
        )
        kind: Any = EngineActor
        handle.actor = kind.options(
            name=name,
            namespace=self._namespace,
            lifetime="detached",
            num_gpus=self._bundle().get("GPU", 0) * len(bundles) if in_process else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                handle.group, placement_group_bundle_index=0
            ),
        ).remote(self._config, handle.rank, self.contact.keys, self.contact.address)
        handle.ready = await handle.actor.start.remote(handle.group)

    async def ended(self, handle: EngineHandle) -> str:
        """Waits for the end of an engine; says why."""
        reason: str | None = None
        try:
            while reason is None:
                reason = await handle.actor.ended.remote(_WATCH_S)
        except ray.exceptions.RayError as error:
            reason = str(error).splitlines()[0]
        return reason

    async def end(self, handle: EngineHandle) -> None:
        """Stop an engine, kill what does not stop, and give its resources back."""
        if handle.watcher is not None and handle.watcher is not asyncio.current_task():
            handle.watcher.cancel()
        if handle.actor is not None:
            try:
                await asyncio.wait_for(handle.actor.stop.remote(), _STOP_S)
            except (TimeoutError, ray.exceptions.RayError):
                pass
            finally:
                _destroy(handle)
        else:
            _destroy(handle)

    async def close(self, handles: list[EngineHandle]) -> None:
        await asyncio.gather(*(self.end(handle) for handle in handles))
        if self._coordinator is not None:
            ray.kill(self._coordinator)

    def _engine_name(self, rank: int) -> str:
        return f"{self._namespace}-engine-{rank}"

    def _bundle(self) -> dict[str, float]:
        """Ray resources of one worker."""
        if self._config.model.device == "cuda":
            return {"GPU": 1.0}
        return {"CPU": self._config.cluster.cpus_per_worker}


def _destroy(handle: EngineHandle) -> None:
    """Kill the actor and give its resources back."""
    if handle.actor is not None:
        ray.kill(handle.actor)
    if handle.group is not None:
        remove_placement_group(handle.group)


def resolve_device(config: Config) -> Config:
    """`auto` is cuda where the Ray cluster has a GPU."""
    if config.model.device != "auto":
        return config
    device = "cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"
    return msgspec.structs.replace(
        config, model=msgspec.structs.replace(config.model, device=device)
    )


def _explain(error: BaseException, rank: int, config: Config) -> StartFailed:
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, ConfigError | ValueError | FileNotFoundError):
        return StartFailed(str(cause), permanent=True)
    if isinstance(error, TimeoutError):
        return StartFailed(
            f"engine {rank} was not ready after cluster.start_timeout_s="
            f"{config.cluster.start_timeout_s:g}: no room for it, or its weights load too slowly",
            permanent=False,
        )
    text = str(cause).strip().splitlines()
    return StartFailed(
        f"engine {rank} did not start: {type(cause).__name__}: {text[-1] if text else ''}",
        permanent=False,
    )
