"""Engines in Ray: placement groups, actors, names. No decisions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from swell.cluster.control import actor_names, strays
from swell.cluster.control.actor_errors import (
    ActorDied,
    ActorError,
    ActorRaised,
    ActorUnavailable,
    GcsUnavailable,
)
from swell.cluster.control.actor_names import EngineName
from swell.cluster.control.coordinator_handle import CoordinatorHandle
from swell.cluster.control.engine_handle import EngineHandle, StartFailed
from swell.cluster.control.fleet_view import Intent
from swell.cluster.control.ray_port import RayPort
from swell.configs.log import StructuredLogger, first_line
from swell.configs.schema import Config, ConfigError
from swell.coordinator.ground import Ground
from swell.coordinator.roster import MemberState

_WATCH_S = 20.0
"""How long one call waits for the end of an engine: a dead manager leaves no thread behind."""
_STOP_S = 5.0
"""How long an engine may take to end by itself before it is killed."""
_ANSWER_S = 10.0
"""How long an engine may take to answer `ready`: it does so beside its work."""
_DOING_S = 2.0
"""How long it may take to answer `doing`."""
_RESERVE_TIMEOUT_S = 10.0
"""How long resources may take to become free: what was killed holds them for some seconds."""
_STRAYS_TIMEOUT_S = 15.0
"""How long strays that were ended may take to be gone."""
_POLL_S = 0.1
_START_BITS = 32
"""Of the part of a name that only one start has."""


class Placement:
    """Engines of one cluster, detached and named, so that a new manager finds them again."""

    def __init__(
        self,
        config: Config,
        identity: str,
        namespace: str,
        coordinator: CoordinatorHandle,
        ray: RayPort,
        ground: Ground,
    ) -> None:
        """`identity`: of the configuration as it was given; see `configs/identity.py`."""
        self._config = config
        self._identity = identity
        self._namespace = namespace
        self._coordinator = coordinator
        self._ray = ray
        self._ground = ground
        self._known: set[str] = set()
        """Names of engines that were placed or adopted here, and not ended."""
        self.strays_left = False
        """Some may still hold resources: `end_strays` is to be called again."""
        self._log = StructuredLogger("cluster.placement")

    def refusal(self, engines: int) -> str | None:
        """Why the Ray cluster can never hold so many; None: it could, if it were empty."""
        total = self._ray.total_resources()
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
        actors = await self._ray.actor_names(self._namespace)
        groups = await self._ray.groups()
        found = actor_names.candidates(actors, groups, self._namespace, self._tag)
        handles = {
            name: EngineHandle(
                name.rank,
                str(name),
                await self._ray.find_actor(str(name), self._namespace),
                groups[str(name)],
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
        except ActorRaised:
            return True  # it still loads
        except (TimeoutError, ActorError):
            return False
        return handle.actor is not None

    async def end_strays(self) -> bool:
        """End everything with a name of this cluster that this manager did not place:
        engines of an earlier one, or of another configuration, and placement groups whose engines
        are dead. Waits until they are gone, for some seconds; then, or if the GCS does not answer,
        `strays_left` is set. Returns whether there were any."""
        ended: set[str] = set()
        self.strays_left = False
        try:
            async with asyncio.timeout(_STRAYS_TIMEOUT_S):
                while await self._end_strays(ended):
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            self.strays_left = True
        return bool(ended)

    async def _end_strays(self, ended: set[str]) -> bool:
        """End each once, add their names to `ended`; whether some are still there."""
        actors = await self._ray.actor_names(self._namespace)
        groups = await self._ray.groups()
        known = self._known | {self._coordinator.name}  # read after them: `plan` may have added one
        found = actor_names.find_strays(actors, groups, self._namespace, known)
        for name in found:
            if name not in ended:
                ended.add(name)
                self._log.warning(
                    "stray ended", name=name, actor=name in actors, group=name in groups
                )
                await strays.end(self._ray, name, self._namespace, groups.get(name))
        return bool(found)

    async def refresh(self, handle: EngineHandle) -> None:
        """Read `ready` again. Raises TimeoutError or ActorError if the engine does not answer."""
        handle.ready = await asyncio.wait_for(self._ray.call(handle.actor, "ready"), _ANSWER_S)

    def plan(self, rank: int) -> EngineHandle:
        start = f"{self._ground.random_bits(_START_BITS):0{_START_BITS // 4}x}"
        name = EngineName(self._namespace, rank, self._tag, start)
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
                handle.ready = await self._ray.call(handle.actor, "start", handle.group)
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
        handle.group = self._ray.create_group(handle.name, bundle, count)
        if await self._ray.wait_for_group(handle.group, _RESERVE_TIMEOUT_S):
            return
        free = await self._ray.free_resources()
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
        handle.actor = self._ray.create_engine(
            handle.name,
            self._namespace,
            handle.group,
            num_gpus=self._bundle().get("GPU", 0) * world if in_process else 0,
            config=self._config,
            rank=handle.rank,
            keys=contact.keys,
            coordinator=contact.address,
        )

    async def doing(self, handle: EngineHandle) -> str:
        """What a newcomer is busy with, for people who wait for it."""
        if handle.actor is None:
            return "waiting for resources"
        try:
            text: str = await asyncio.wait_for(self._ray.call(handle.actor, "doing"), _DOING_S)
            return text
        except (TimeoutError, ActorError):
            return "starting a process"

    async def ended(self, handle: EngineHandle) -> str:
        """Waits for the end of an engine; returns why it ended."""
        reason: str | None = None
        try:
            while reason is None:
                reason = await self._ray.call(handle.actor, "ended", _WATCH_S)
        except ActorError as error:
            reason = first_line(error)
        return reason

    async def end(self, handle: EngineHandle) -> None:
        """Stop an engine, kill what does not stop, and give its resources back."""
        _cancel_watcher(handle)
        try:
            if handle.actor is not None:
                await asyncio.wait_for(self._ray.call(handle.actor, "stop"), _STOP_S)
        except (TimeoutError, ActorError):
            pass
        finally:
            self._destroy(handle)

    async def kill(self, handle: EngineHandle) -> None:
        """End an engine that may not answer any more: `RayPort.kill` alone waits for seconds."""
        _cancel_watcher(handle)
        here = handle.ready is not None and handle.ready.node == self._ray.node_id
        if handle.ready is not None and here and handle.ended is None:
            self._ray.kill_process(handle.ready.pid)
        self._destroy(handle)

    async def close(self, handles: list[EngineHandle]) -> None:
        await asyncio.gather(*(self.end(handle) for handle in handles))

    def _destroy(self, handle: EngineHandle) -> None:
        """From now on a stray, if Ray does not end it."""
        self._known.discard(handle.name)
        if handle.actor is not None:
            self._ray.kill(handle.actor)
        if handle.group is not None:
            self._ray.remove_group(handle.group)

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


def resolve_device(config: Config, total_resources: Mapping[str, float]) -> Config:
    """`auto` is cuda where the Ray cluster has a GPU."""
    if config.model.device != "auto":
        return config
    device = "cuda" if total_resources.get("GPU", 0) >= 1 else "cpu"
    return msgspec.structs.replace(
        config, model=msgspec.structs.replace(config.model, device=device)
    )


def _explain(error: BaseException, rank: int, config: Config) -> StartFailed:
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, ConfigError | ValueError | FileNotFoundError):
        return StartFailed(str(cause), permanent=True)
    if isinstance(error, TimeoutError) and not isinstance(error, GcsUnavailable):
        return StartFailed(
            f"engine {rank} was not ready after cluster.start_timeout_s="
            f"{config.cluster.start_timeout_s:g}: it hangs, or its weights load too slowly",
            permanent=False,
        )
    if isinstance(cause, ActorDied | ActorUnavailable):
        return StartFailed(f"engine {rank} did not start: its process ended", permanent=False)
    text = str(cause).strip().splitlines()
    return StartFailed(
        f"engine {rank} did not start: {type(cause).__name__}: {text[-1] if text else ''}",
        permanent=False,
    )
