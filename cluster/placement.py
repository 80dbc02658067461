"""Ray's part of an engine's life: placement groups, actors, names. No decisions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass
from typing import Any

import msgspec
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from swell.cluster import coordinator_handle
from swell.cluster.coordinator_handle import CoordinatorHandle
from swell.configs.log import FactLogger
from swell.configs.schema import Config, ConfigError
from swell.coordinator.roster import Member, MemberState
from swell.engine.actor import EngineActor, EngineReady

_WATCH_S = 20.0
"""How long one look at the end of an engine takes: a manager that dies leaves no thread behind."""
_STOP_S = 5.0
"""How long an engine may take to end by itself before it is killed."""
_ANSWER_S = 10.0
"""How long an engine may take to say how it is: it does so beside its work."""
_ROOM_S = 10.0
"""How long resources may take to become free: what was killed holds them for some seconds."""


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
    """It takes no new requests, and goes."""
    moving: bool = False
    """The manager is changing its place in the roster."""
    joined_at: float = 0.0
    """By the clock of the manager's event loop."""
    repairs: int = 0
    """Workers that had been replaced when `ready` was told."""
    ended: str | None = None
    """Why it has ended."""
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
            incarnation=self.ready.incarnation,
            store=self.ready.store,
            num_blocks=limits.num_blocks,
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
    """Engines of one cluster, detached and named, so that a new manager finds them again."""

    def __init__(self, config: Config, namespace: str, coordinator: CoordinatorHandle) -> None:
        self._config = config
        self._namespace = namespace
        self._coordinator = coordinator
        self._log = FactLogger("cluster.placement")

    def refusal(self, engines: int) -> str | None:
        """Why the Ray cluster can never hold so many, or None: it could if nobody else were
        there."""
        total = ray.cluster_resources()
        workers = engines * self._config.parallel.world
        for name, amount in self._bundle().items():
            needed, there = amount * workers, total.get(name, 0.0)
            if needed > there + 1e-6:
                return (
                    f"no room for {engines} engines: their {workers} workers need {needed:g} "
                    f"{name}, and the Ray cluster has {there:g}"
                )
        return None

    async def adopt(self) -> list[EngineHandle]:
        """Engines in the roster that live. Others, which an earlier manager was starting or
        ending, are ended."""
        members = (await self._coordinator.view()).roster.members
        found = await asyncio.gather(*(self._find(member) for member in members))
        handles = [handle for handle in found if handle is not None]
        kept = {handle.rank for handle in handles}
        gone = {member.rank for member in members} - kept | self._end_strays(kept)
        if gone:
            await self._coordinator.lose(sorted(gone))
        return handles

    async def _find(self, member: Member) -> EngineHandle | None:
        name = self._engine_name(member.rank)
        handle = EngineHandle(member.rank, leaving=member.state is MemberState.LEAVING)
        try:
            handle.actor = ray.get_actor(name, namespace=self._namespace)
            await self.refresh(handle)
            handle.group = ray.util.get_placement_group(name)
        except (ValueError, TimeoutError, ray.exceptions.RayError):
            return None
        return handle

    def _end_strays(self, adopted: set[int]) -> set[int]:
        """Returns their ranks."""
        names = {self._engine_name(rank) for rank in adopted} | {coordinator_handle.NAME}
        ranks: set[int] = set()
        for actor in ray.util.list_named_actors(all_namespaces=True):
            name = actor["name"]
            if actor["namespace"] != self._namespace or name in names:
                continue
            self._log.warning("stray engine ended", name=name)
            rank = int(name.rpartition("-")[2])
            stray = EngineHandle(rank, ray.get_actor(name, namespace=self._namespace))
            with contextlib.suppress(ValueError):
                stray.group = ray.util.get_placement_group(name)
            _destroy(stray)
            ranks.add(rank)
        return ranks

    async def refresh(self, handle: EngineHandle) -> None:
        """Ask the engine how it is now. Raises TimeoutError or RayError if it does not answer."""
        handle.ready = await asyncio.wait_for(handle.actor.ready.remote(), _ANSWER_S)

    def plan(self, rank: int) -> EngineHandle:
        return EngineHandle(rank)

    async def start(self, handle: EngineHandle) -> None:
        """Reserve resources, start the processes, load. Raises StartFailed and leaves nothing."""
        try:
            async with asyncio.timeout(self._config.cluster.start_timeout_s):
                await self._reserve(handle)
                await self._start(handle)
        except TimeoutError as error:
            await self.kill(handle)
            raise _explain(error, handle.rank, self._config) from error
        except BaseException as error:
            await self.end(handle)
            if isinstance(error, asyncio.CancelledError | StartFailed):
                raise
            raise _explain(error, handle.rank, self._config) from error

    async def _reserve(self, handle: EngineHandle) -> None:
        bundle, count = self._bundle(), self._config.parallel.world
        name = self._engine_name(handle.rank)
        handle.group = placement_group(
            [bundle] * count, strategy="PACK", name=name, lifetime="detached"
        )
        if await asyncio.to_thread(handle.group.wait, _ROOM_S):
            return
        free = ray.available_resources()
        raise StartFailed(
            f"no room for engine {handle.rank}: it needs "
            + ", ".join(f"{count} times {amount:g} {kind}" for kind, amount in bundle.items())
            + "; free: "
            + ", ".join(f"{free.get(kind, 0.0):g} {kind}" for kind in bundle),
            permanent=False,
        )

    async def _start(self, handle: EngineHandle) -> None:
        contact = self._coordinator.contact
        assert contact is not None
        world, executor = self._config.parallel.world, self._config.parallel.executor
        in_process = executor == "inproc" or (executor == "auto" and world == 1)
        kind: Any = EngineActor
        handle.actor = kind.options(
            name=self._engine_name(handle.rank),
            namespace=self._namespace,
            lifetime="detached",
            num_gpus=self._bundle().get("GPU", 0) * world if in_process else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                handle.group, placement_group_bundle_index=0
            ),
        ).remote(self._config, handle.rank, contact.keys, contact.address)
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
        _unwatch(handle)
        try:
            if handle.actor is not None:
                await asyncio.wait_for(handle.actor.stop.remote(), _STOP_S)
        except (TimeoutError, ray.exceptions.RayError):
            pass
        finally:
            _destroy(handle)

    async def kill(self, handle: EngineHandle) -> None:
        """End an engine that may not hear any more. Ray asks first, and waits for seconds."""
        _unwatch(handle)
        here = ray.get_runtime_context().get_node_id()
        if handle.ready is not None and handle.ready.node == here and handle.ended is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(handle.ready.pid, signal.SIGKILL)
        _destroy(handle)

    async def close(self, handles: list[EngineHandle]) -> None:
        await asyncio.gather(*(self.end(handle) for handle in handles))

    def _engine_name(self, rank: int) -> str:
        return f"{self._namespace}-engine-{rank}"

    def _bundle(self) -> dict[str, float]:
        """Ray resources of one worker."""
        if self._config.model.device == "cuda":
            return {"GPU": 1.0}
        return {"CPU": self._config.cluster.cpus_per_worker}


def _unwatch(handle: EngineHandle) -> None:
    if handle.watcher is not None and handle.watcher is not asyncio.current_task():
        handle.watcher.cancel()


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
            f"{config.cluster.start_timeout_s:g}: it hangs, or its weights load too slowly",
            permanent=False,
        )
    if isinstance(cause, ray.exceptions.RayActorError):
        return StartFailed(f"engine {rank} did not start: its process ended", permanent=False)
    text = str(cause).strip().splitlines()
    return StartFailed(
        f"engine {rank} did not start: {type(cause).__name__}: {text[-1] if text else ''}",
        permanent=False,
    )
