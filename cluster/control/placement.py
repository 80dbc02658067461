"""Engines in Ray: placement groups, actors, names. No decisions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from dataclasses import dataclass
from typing import Any

import msgspec
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from swell.cluster.control import actor_names, strays
from swell.cluster.control.actor_names import EngineName
from swell.cluster.control.coordinator_handle import CoordinatorHandle
from swell.cluster.control.fleet_view import Intent
from swell.configs.log import StructuredLogger
from swell.configs.schema import Config, ConfigError
from swell.coordinator.roster import Member, MemberState
from swell.engine.actor import EngineActor, EngineReady

_WATCH_S = 20.0
"""How long one call waits for the end of an engine: a dead manager leaves no thread behind."""
_STOP_S = 5.0
"""How long an engine may take to end by itself before it is killed."""
_ANSWER_S = 10.0
"""How long an engine may take to answer `ready`: it does so beside its work."""
_RESERVE_TIMEOUT_S = 10.0
"""How long resources may take to become free: what was killed holds them for some seconds."""
_STRAYS_TIMEOUT_S = 15.0
"""How long strays that were ended may take to be gone."""
_POLL_S = 0.1


class StartFailed(RuntimeError):
    """An engine did not start. `permanent`: it would fail again in the same way."""

    def __init__(self, message: str, *, permanent: bool) -> None:
        super().__init__(message)
        self.permanent = permanent


@dataclass(eq=False)
class EngineHandle:
    """One engine that was placed, or is about to be."""

    rank: int
    name: str = ""
    """Of this start alone."""
    actor: Any = None
    group: Any = None
    ready: EngineReady | None = None
    starting: asyncio.Task[None] | None = None
    """Until it is ready."""
    intent: Intent = Intent.STAY
    leave_deadline_s: float = 0.0
    """When it is detached even if it has requests, by the clock of the manager's event loop."""
    idle_polls: int = 0
    """How often in a row it was seen without requests since it is leaving."""
    in_transition: bool = False
    """The manager is changing its place in the roster."""
    joined_at: float = 0.0
    """By the clock of the manager's event loop."""
    repairs: int = 0
    """Workers that had been replaced when `ready` was read."""
    ended: str | None = None
    """Why it has ended."""
    exit_watcher: asyncio.Task[None] | None = None

    @property
    def leaving(self) -> bool:
        """It takes no new requests, and is to end; one that is starting is not wanted any more."""
        return self.intent is not Intent.STAY

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

    def __init__(
        self, config: Config, identity: str, namespace: str, coordinator: CoordinatorHandle
    ) -> None:
        """`identity`: of the configuration as it was given; see `configs/identity.py`."""
        self._config = config
        self._identity = identity
        self._namespace = namespace
        self._coordinator = coordinator
        self._known: set[str] = set()
        """Names of engines that were placed or adopted here, and not ended."""
        self._log = StructuredLogger("cluster.placement")

    def refusal(self, engines: int) -> str | None:
        """Why the Ray cluster can never hold so many; None: it could, if it were empty."""
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

    async def adopt(self) -> tuple[list[EngineHandle], list[EngineHandle]]:
        """What an earlier manager left: engines that serve, and engines that load or have not
        joined yet. Everything else with a name of this cluster is ended."""
        self._known.clear()
        roster = (await self._coordinator.view()).roster
        actors = strays.actor_names(self._namespace)
        groups = self._groups()
        found = actor_names.candidates(actors, groups, self._namespace, self._tag)
        handles = {
            name: EngineHandle(
                name.rank,
                str(name),
                strays.find_actor(str(name), self._namespace),
                strays.group(groups[str(name)][0]),
            )
            for name in found
        }
        alive = await asyncio.gather(*(self._probe(handle) for handle in handles.values()))
        answers = {
            name: handle.ready.incarnation if handle.ready else None
            for (name, handle), is_alive in zip(handles.items(), alive, strict=True)
            if is_alive
        }
        kept = [handles[name] for name in actor_names.choose(answers, roster).values()]
        self._known |= {handle.name for handle in kept}
        await self.end_strays()
        serving: list[EngineHandle] = []
        newcomers: list[EngineHandle] = []
        for handle in kept:
            start = handle.ready.incarnation if handle.ready else None
            member = None if start is None else roster.find(handle.rank, start)
            if member is not None and member.state is MemberState.LEAVING:
                handle.intent = Intent.LEAVE
            (newcomers if member is None else serving).append(handle)
        gone = set(roster.ranks) - {handle.rank for handle in serving}
        if gone:
            await self._coordinator.remove_failed(sorted(gone))
        return serving, newcomers

    async def _probe(self, handle: EngineHandle) -> bool:
        """Whether the engine lives; `ready` is set if it has loaded."""
        try:
            if handle.actor is not None:
                await self.refresh(handle)
        except ray.exceptions.RayTaskError:
            return True  # it still loads
        except (TimeoutError, ray.exceptions.RayError):
            return False
        return handle.actor is not None

    async def end_strays(self) -> bool:
        """End everything with a name of this cluster that this manager did not place:
        engines of an earlier one, or of another configuration, and placement groups whose engines
        are dead. Waits until they are gone, for some seconds. Returns whether there were any."""
        ended: set[str] = set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STRAYS_TIMEOUT_S):
                while self._end_strays(ended):
                    await asyncio.sleep(_POLL_S)
        return bool(ended)

    def _end_strays(self, ended: set[str]) -> bool:
        """End each once, add their names to `ended`; whether some are still there."""
        known = self._known | {self._coordinator.name}
        actors = strays.actor_names(self._namespace) - known
        groups = {name: ids for name, ids in self._groups().items() if name not in known}
        for name in (actors | set(groups)) - ended:
            self._log.warning("stray ended", name=name, actor=name in actors, group=name in groups)
            strays.end(name, self._namespace, groups.get(name, ()))
            ended.add(name)
        return bool(actors or groups)

    async def refresh(self, handle: EngineHandle) -> None:
        """Read `ready` again. Raises TimeoutError or RayError if the engine does not answer."""
        handle.ready = await asyncio.wait_for(handle.actor.ready.remote(), _ANSWER_S)

    def plan(self, rank: int) -> EngineHandle:
        name = EngineName(self._namespace, rank, self._tag, secrets.token_hex(4))
        self._known.add(str(name))
        return EngineHandle(rank, str(name))

    async def start(self, handle: EngineHandle) -> None:
        """Reserve resources, start the processes, load. Raises StartFailed and leaves nothing; one
        that is cancelled leaves all to its caller, who ends it.

        An engine that was adopted while it loaded is waited for."""
        try:
            async with asyncio.timeout(self._config.cluster.start_timeout_s):
                if handle.actor is None:
                    await self.end_strays()
                    await self._reserve(handle)
                    self._create(handle)
                handle.ready = await handle.actor.start.remote(handle.group)
        except asyncio.CancelledError:
            raise
        except TimeoutError as error:
            await self.kill(handle)
            raise _explain(error, handle.rank, self._config) from error
        except BaseException as error:
            await self.end(handle)
            if isinstance(error, StartFailed):
                raise
            raise _explain(error, handle.rank, self._config) from error

    async def _reserve(self, handle: EngineHandle) -> None:
        bundle, count = self._bundle(), self._config.parallel.world
        handle.group = placement_group(
            [bundle] * count, strategy="PACK", name=handle.name, lifetime="detached"
        )
        if await asyncio.to_thread(handle.group.wait, _RESERVE_TIMEOUT_S):
            return
        free = ray.available_resources()
        raise StartFailed(
            f"no room for engine {handle.rank}: it needs "
            + ", ".join(f"{count} times {amount:g} {kind}" for kind, amount in bundle.items())
            + "; free: "
            + ", ".join(f"{free.get(kind, 0.0):g} {kind}" for kind in bundle),
            permanent=False,
        )

    def _create(self, handle: EngineHandle) -> None:
        contact = self._coordinator.contact
        assert contact is not None
        world, executor = self._config.parallel.world, self._config.parallel.executor
        in_process = executor == "inproc" or (executor == "auto" and world == 1)
        kind: Any = EngineActor
        handle.actor = kind.options(
            name=handle.name,
            namespace=self._namespace,
            lifetime="detached",
            num_gpus=self._bundle().get("GPU", 0) * world if in_process else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                handle.group, placement_group_bundle_index=0
            ),
        ).remote(self._config, handle.rank, contact.keys, contact.address)

    async def ended(self, handle: EngineHandle) -> str:
        """Waits for the end of an engine; returns why it ended."""
        reason: str | None = None
        try:
            while reason is None:
                reason = await handle.actor.ended.remote(_WATCH_S)
        except ray.exceptions.RayError as error:
            reason = str(error).splitlines()[0]
        return reason

    async def end(self, handle: EngineHandle) -> None:
        """Stop an engine, kill what does not stop, and give its resources back."""
        _cancel_watcher(handle)
        try:
            if handle.actor is not None:
                await asyncio.wait_for(handle.actor.stop.remote(), _STOP_S)
        except (TimeoutError, ray.exceptions.RayError):
            pass
        finally:
            self._destroy(handle)

    async def kill(self, handle: EngineHandle) -> None:
        """End an engine that may not answer any more: `ray.kill` alone waits for seconds."""
        _cancel_watcher(handle)
        here = ray.get_runtime_context().get_node_id()
        if handle.ready is not None and handle.ready.node == here and handle.ended is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(handle.ready.pid, signal.SIGKILL)
        self._destroy(handle)

    async def close(self, handles: list[EngineHandle]) -> None:
        await asyncio.gather(*(self.end(handle) for handle in handles))

    def _destroy(self, handle: EngineHandle) -> None:
        """From now on a stray, if Ray does not end it."""
        self._known.discard(handle.name)
        strays.destroy(handle.actor, handle.group)

    def _groups(self) -> dict[str, list[str]]:
        return strays.group_ids(lambda name: actor_names.is_group(name, self._namespace))

    @property
    def _tag(self) -> str:
        contact = self._coordinator.contact
        assert contact is not None, "the coordinator is opened first"
        return actor_names.engine_tag(self._identity, contact.keys.public.hex())

    def _bundle(self) -> dict[str, float]:
        """Ray resources of one worker."""
        if self._config.model.device == "cuda":
            return {"GPU": 1.0}
        return {"CPU": self._config.cluster.cpus_per_worker}


def _cancel_watcher(handle: EngineHandle) -> None:
    if handle.exit_watcher is not None and handle.exit_watcher is not asyncio.current_task():
        handle.exit_watcher.cancel()


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
