"""Places engines in Ray: placement groups, actors, names. No decisions."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from swell.cluster.control.engines import actor_names
from swell.cluster.control.engines.actor_names import EngineName
from swell.cluster.control.engines.engine_handle import (
    EngineHandle,
    NoRoom,
    StartFailed,
    WeightsRefused,
)
from swell.cluster.control.engines.orphans import OrphanCollector
from swell.cluster.control.plan import resources
from swell.cluster.control.plan.fleet_view import Intent
from swell.cluster.control.plan.versions import Version
from swell.cluster.control.ray.actor_errors import (
    ActorDied,
    ActorError,
    ActorRaised,
    ActorUnavailable,
    GcsUnavailable,
)
from swell.cluster.control.ray.coordinator_handle import CoordinatorHandle
from swell.cluster.control.ray.ray_interface import Group, RayInterface
from swell.configs.runtime.log import StructuredLogger, first_line
from swell.configs.schema import Config, ConfigError
from swell.coordinator.manager_state import NotLeading
from swell.coordinator.roster import MemberState
from swell.coordinator.transport.runtime import Runtime
from swell.engine.serving.actor_results import EngineReady, NewWeightsRefused, StartStatus

_WATCH_S = 20.0
"""How long a call waits for an engine to stop, so that a dead manager frees the thread."""
_STOP_S = 5.0
"""How long an engine may take to stop before it is killed."""
_ANSWER_S = 10.0
"""How long an engine may take to answer `ready`, which it does while it works."""
_PROBES = 3.0
"""Limit of probing a member, in units of `stall_timeout_s`: by then a hanging one is removed."""
_KILL_S = 3.0
"""How long to wait for the death of a process: on a lost host it cannot be killed."""
_SAVE_S = 6.0
"""How long it may take to save the state of an engine that hangs."""
_HANG_REPORTS = 8
"""Number of these states that are listed, the newest ones."""
_STATUS_S = 2.0
"""How long an engine may take to answer `status`."""
_RESERVE_TIMEOUT_S = 10.0
"""How long resources may take to become free: killed processes hold them for some seconds."""
_ROOM_S = 2.0
"""Time until an engine counts as waiting for room, and between checks of its needs."""
_POLL_S = 0.1
_START_BITS = 32
"""Number of random bits in a name, which make each start unique."""


class Adopted(NamedTuple):
    """Engines that an earlier manager left."""

    serving: list[EngineHandle]
    newcomers: list[EngineHandle]
    """Engines that load, or have not joined yet."""
    needed: list[str]
    """The versions that unfinished responses needed when all engines had answered."""


class Placement:
    """Places the engines of one cluster, detached and named, so that a new manager finds them."""

    def __init__(
        self,
        config: Config,
        namespace: str,
        coordinator: CoordinatorHandle,
        ray: RayInterface,
        runtime: Runtime,
        may_end: Callable[[], Awaitable[bool]],
    ) -> None:
        """`config`: all versions have the same `cluster` section. `may_end`: called before a
        hanging engine is terminated. If this manager is cut off from Ray, the engine may serve
        another manager."""
        self._config = config
        self._namespace = namespace
        self._coordinator = coordinator
        self._ray = ray
        self._runtime = runtime
        self._known: set[str] = set()
        """Names of engines that were placed or adopted here and not terminated."""
        self.hang_reports: deque[str] = deque(maxlen=_HANG_REPORTS)
        """Files with the state of engines that hung, `HOST:PATH`."""
        self.may_end = may_end
        known, look_s = lambda: {*self._known, coordinator.name}, config.cluster.stall_timeout_s
        self.orphans = OrphanCollector(ray, namespace, known, may_end, look_s)
        self._log = StructuredLogger("cluster.placement")

    async def refusal(self, version: Version, engines: int) -> str | None:
        """Returns why the Ray cluster can never hold this many engines of the version. None if an
        empty cluster could hold them, if hosts may join, or if the GCS does not answer: the engines
        are then tried until they fit."""
        may_join = self._config.autoscaling.waits_for_room
        return None if may_join else await self._refusal(version, engines)

    async def _refusal(self, version: Version, engines: int) -> str | None:
        """Like `refusal`, for the hosts that are alive now."""
        try:
            nodes = await self._ray.node_resources()
        except GcsUnavailable:
            return None
        return resources.refusal(version.config, nodes, engines)

    async def draining_nodes(self) -> dict[str, float]:
        """Returns nodes that Ray takes away: id -> seconds until then. Raises `GcsUnavailable`."""
        return await self._ray.draining_nodes()

    async def adopt(self, versions: Sequence[Version]) -> Adopted:
        """Returns the engines of these versions, except those that the coordinator has removed
        because they had stopped. Terminates everything else with a name of this cluster."""
        self._known.clear()
        actors = await self._ray.actor_names(self._namespace)
        groups = await self._ray.groups()
        tags = {self._tag(version) for version in versions}
        found = actor_names.candidates(actors, groups, self._namespace, tags)
        handles = {
            name: EngineHandle(
                name.rank,
                str(name),
                actor=await self._ray.find_actor(str(name), self._namespace),
                group=groups[str(name)],
            )
            for name in found
        }
        by_name = {version.name: version for version in versions}
        first = await self._probe_all(handles, by_name)
        now = await self._coordinator.membership()
        roster = now.view.roster
        unheard = [each.rank for each in roster.members if each.incarnation not in first.values()]
        # An engine may have joined a restarted coordinator while the others were probed.
        again = {name: handles[name] for name in first if name.rank in unheard}
        answers = {name: first[name] for name in first if name not in again}
        answers |= await self._probe_all(again, by_name)
        stalled = {engine.incarnation for engine in now.stalled_engines}
        answers = {name: answers[name] for name in answers if answers[name] not in stalled}
        kept = [handles[name] for name in actor_names.choose(answers, roster).values()]
        self._known |= {handle.name for handle in kept}
        await self.orphans.collect()
        serving: list[EngineHandle] = []
        newcomers: list[EngineHandle] = []
        for handle in kept:
            start = handle.ready.incarnation if handle.ready else None
            member = None if start is None else roster.find(handle.rank, start)
            if member is not None and member.state is MemberState.LEAVING:
                handle.intent = Intent.LEAVE
            (newcomers if member is None else serving).append(handle)
        kept_ranks = {handle.rank for handle in serving}
        if gone := [member for member in roster.members if member.rank not in kept_ranks]:
            incarnations = [member.incarnation for member in gone]
            await self._coordinator.remove_failed([member.rank for member in gone], incarnations)
        return Adopted(serving, newcomers, now.versions)

    async def _probe_all(
        self, handles: Mapping[EngineName, EngineHandle], versions: Mapping[str, Version]
    ) -> dict[EngineName, int | None]:
        """Returns the incarnations of the engines that answer; None: it is loading."""
        alive = await asyncio.gather(*(self._probe(each, versions) for each in handles.values()))
        return {
            name: handle.ready.incarnation if handle.ready else None
            for (name, handle), is_alive in zip(handles.items(), alive, strict=True)
            if is_alive
        }

    async def _probe(self, handle: EngineHandle, versions: Mapping[str, Version]) -> bool:
        """Whether the engine is alive and runs one of these versions, by name. Sets `ready` if it
        has loaded. A member that does not answer is probed again: the coordinator detects hangs."""
        patience_s = _PROBES * self._config.cluster.stall_timeout_s
        until = asyncio.get_running_loop().time() + patience_s
        while handle.actor is not None:
            try:
                await self._read_version(handle, versions)
                return handle.version is not None
            except TimeoutError:
                roster = (await self._coordinator.view()).roster
                if roster.find(handle.rank) is None or asyncio.get_running_loop().time() > until:
                    return False
                await asyncio.sleep(_POLL_S)
            except ActorError:
                return False
        return False

    async def _read_version(self, handle: EngineHandle, versions: Mapping[str, Version]) -> None:
        """Sets the version that the engine runs or is about to run, and `ready` if it has
        loaded."""
        adopting = self._ask(handle, "adopt", self._coordinator.manager_id())
        name = await asyncio.wait_for(adopting, _ANSWER_S)
        try:
            await self.refresh(handle)
        except ActorRaised:
            handle.ready = None  # the engine is still loading
        handle.version = versions.get(handle.ready.version if handle.ready else name)

    async def refresh(self, handle: EngineHandle) -> None:
        """Reads `ready` again. Raises TimeoutError or ActorError if the engine does not answer."""
        before, asked = handle.ready, self._ask(handle, "ready")
        ready = await asyncio.wait_for(asked, _ANSWER_S)
        if handle.ready is before:
            handle.ready = ready

    def plan(self, rank: int, version: Version) -> EngineHandle:
        start = f"{self._runtime.random_bits(_START_BITS):0{_START_BITS // 4}x}"
        name = EngineName(self._namespace, rank, self._tag(version), start)
        self._known.add(str(name))
        return EngineHandle(rank, str(name), version)

    async def start(self, handle: EngineHandle, on_waiting: Callable[[], None]) -> None:
        """Reserves resources, starts the processes and loads. Raises StartFailed after cleaning up.
        If cancelled, it leaves everything to the caller, which terminates the engine. `on_waiting`
        is called when the engine starts or stops waiting for room.

        An engine that was adopted while it loaded only has to finish. An engine whose processes run
        another version loads the weights of its new one; if it cannot use them this raises
        WeightsRefused, and the processes stay. An engine without room waits without limit if hosts
        may join: Ray's autoscaler sees its placement group.
        """
        try:
            if handle.actor is None:
                await self.orphans.collect()
                await self._reserve(handle, on_waiting)
            async with asyncio.timeout(self._config.cluster.start_timeout_s):
                if handle.actor is not None:
                    handle.ready = await self._load(handle)
                else:
                    handle.ready, handle.process_s = await self._create_and_load(handle)
        except (asyncio.CancelledError, WeightsRefused):
            raise
        except TimeoutError as error:
            await self.kill(handle)
            raise _explain(error, handle) from error
        except BaseException as error:
            await self.end(handle)
            if isinstance(error, StartFailed):
                raise
            raise _explain(error, handle) from error

    async def _create_and_load(self, handle: EngineHandle) -> tuple[EngineReady, float]:
        """Returns the engine, and the seconds that its process took to start."""
        clock = asyncio.get_running_loop().time
        began = clock()
        await self._create(handle)
        ready = await self._load(handle)
        return ready, max(0.0, clock() - began - sum(each.seconds for each in ready.start))

    async def _load(self, handle: EngineHandle) -> EngineReady:
        contact, version = self._coordinator.contact, handle.version
        assert contact is not None and version is not None
        arguments = (handle.group, version.config, version.name, contact)
        try:
            ready: EngineReady = await self._ask(handle, "start", *arguments)
        except ActorRaised as error:
            if handle.previous is not None and isinstance(error.cause, NewWeightsRefused):
                raise WeightsRefused(str(error.cause), handle.previous) from error
            raise
        if ready.version != version.name:
            raise StartFailed(f"it runs {ready.version}, not {version.name}", permanent=False)
        return ready

    async def _reserve(self, handle: EngineHandle, on_waiting: Callable[[], None]) -> None:
        assert handle.version is not None
        bundle, count = resources.bundles(handle.version.config)
        handle.in_doubt = True
        handle.group = await self._ray.create_group(handle.name, bundle, count)
        handle.in_doubt = False
        try:
            async with asyncio.timeout(self._extra_wait_s(handle)):
                await self._wait_for_room(handle, on_waiting)
        except TimeoutError:
            raise NoRoom(handle.waits_for_room or await self._lack(handle)) from None
        finally:
            if handle.waits_for_room is not None:
                handle.waits_for_room = None
                on_waiting()

    def _extra_wait_s(self, handle: EngineHandle) -> float | None:
        """Returns the time limit, if any. An upgrade can continue without an extra engine, and
        unfinished responses wait only that long for an engine."""
        is_apart = handle.is_extra or handle.for_answers
        return self._config.cluster.start_timeout_s if is_apart else None

    async def _wait_for_room(self, handle: EngineHandle, on_waiting: Callable[[], None]) -> None:
        waits = handle.for_answers or self._config.autoscaling.waits_for_room
        timeout_s = _ROOM_S if waits else _RESERVE_TIMEOUT_S
        while not await self._is_reserved(handle.group, timeout_s, waits):
            reason = await self._lack(handle)
            if not waits:
                raise NoRoom(reason)  # a host may join
            was_known, handle.waits_for_room = handle.waits_for_room is not None, reason
            if not was_known:
                self._log.warning("waits for room", rank=handle.rank, reason=reason)
                on_waiting()

    async def _is_reserved(self, group: Group, timeout_s: float, waits: bool) -> bool:
        try:
            return await self._ray.wait_for_group(group, timeout_s)
        except GcsUnavailable:
            if not waits:
                raise
            return False

    async def _lack(self, handle: EngineHandle) -> str:
        """Returns why the engine cannot be placed: the resources that it lacks."""
        assert handle.version is not None
        if reason := await self._refusal(handle.version, 1):
            return reason
        bundle, count = resources.bundles(handle.version.config)
        try:
            free = await self._ray.free_resources()
        except GcsUnavailable as error:
            return f"no room for engine {handle.rank} yet: {first_line(error)}"
        needs = ", ".join(f"{count} times {amount:g} {kind}" for kind, amount in bundle.items())
        there = ", ".join(f"{free.get(kind, 0.0):g} {kind}" for kind in bundle)
        return f"no room for engine {handle.rank}: it needs {needs}; free: {there}"

    async def _create(self, handle: EngineHandle) -> None:
        version = handle.version
        assert version is not None
        handle.in_doubt = True
        handle.actor = await self._ray.create_engine(
            handle.name,
            self._namespace,
            handle.group,
            num_gpus=resources.gpus_of_process(version.config),
            config=version.config,
            rank=handle.rank,
            version=version.name,
        )
        handle.in_doubt = False

    async def status(self, handle: EngineHandle) -> StartStatus:
        """Returns what a starting engine is doing, for waiting people."""
        if handle.actor is None:
            return StartStatus(handle.waits_for_room or "waiting for resources")
        try:
            call = self._ray.call(handle.actor, "status")
            status: StartStatus = await asyncio.wait_for(call, _STATUS_S)
        except (TimeoutError, ActorError):
            return StartStatus("starting a process")
        return status

    async def ended(self, handle: EngineHandle) -> str:
        """Waits until an engine stops. Returns why it stopped."""
        reason: str | None = None
        try:
            while reason is None:
                reason = await self._ask(handle, "ended", _WATCH_S)
        except ActorError as error:
            reason = first_line(error)
        return reason

    async def _ask(self, handle: EngineHandle, method: str, *args: Any) -> Any:
        """Returns the answer of an engine. The call is repeated while the connection breaks: the
        engine may live, and Ray raises ActorDied once it is dead."""
        while True:
            try:
                return await self._ray.call(handle.actor, method, *args)
            except ActorUnavailable:
                await asyncio.sleep(_POLL_S)

    async def end(self, handle: EngineHandle) -> None:
        """Stops an engine, kills what does not stop, and frees its resources. Does nothing if
        another manager has adopted it. If cancelled, leaves an engine that may live to the
        collector of orphans: a manager is cancelled when it learns of its successor."""
        _cancel_watcher(handle)
        try:
            may_destroy = await self._stop(handle)
        except BaseException:
            if handle.ended is None:
                self._known.discard(handle.name)
                self.orphans.suspect(f"engine {handle.rank} may not have stopped")
            else:
                await self._destroy(handle)
            raise
        if may_destroy:
            await self._destroy(handle)

    async def _stop(self, handle: EngineHandle) -> bool:
        """Stops an engine. Returns whether this manager may kill its processes. Another manager may
        have adopted an engine that has not answered."""
        if handle.actor is None:
            return True
        stopping = self._ray.call(handle.actor, "stop", self._coordinator.manager_id())
        try:
            await asyncio.wait_for(stopping, _STOP_S)
        except ActorRaised as error:
            return not isinstance(error.cause, NotLeading)
        except (TimeoutError, ActorUnavailable):
            return handle.ended is not None or await self.may_end()
        except ActorError:
            pass
        return True

    async def kill(self, handle: EngineHandle) -> None:
        """Kills an engine that may hang: its process first, because `RayInterface.kill` takes
        seconds."""
        _cancel_watcher(handle)
        if handle.ended is None and not await self.may_end():
            return
        try:
            if handle.ready is not None and handle.ended is None:
                await self._save_state(handle, handle.ready)
                killed = self._ray.kill_process(handle.ready.pid, handle.ready.node)
                await asyncio.wait_for(killed, _KILL_S)
        except (ActorError, TimeoutError) as error:
            self._log.warning(
                "process not terminated yet", rank=handle.rank, error=first_line(error)
            )
        finally:
            await self._destroy(handle)

    async def _save_state(self, handle: EngineHandle, ready: EngineReady) -> None:
        saved = self._ray.save_hang_report(f"engine {handle.rank} hung", ready.pid, ready.node)
        with suppress(TimeoutError):
            if file := await asyncio.wait_for(saved, _SAVE_S):
                self.hang_reports.append(file)
                self._log.warning("state of the engine is saved", rank=handle.rank, file=file)

    async def close(self, handles: list[EngineHandle]) -> None:
        """Terminates these engines, and then everything else with a name of this cluster: parts
        that Ray is still creating, and engines whose end was cancelled."""
        await asyncio.gather(*(self.end(handle) for handle in handles))
        self._known.clear()
        await self.orphans.collect()

    async def _destroy(self, handle: EngineHandle) -> None:
        """Kills the actor and removes the group: orphans from now on if Ray does not confirm."""
        self._known.discard(handle.name)
        was_in_doubt, handle.in_doubt = handle.in_doubt, True
        try:
            if handle.actor is not None:
                await self._ray.kill(handle.actor)
            if handle.group is not None:
                await self._ray.remove_group(handle.group)
            handle.in_doubt = was_in_doubt
        except GcsUnavailable as error:
            self._log.warning(
                "engine not terminated yet", rank=handle.rank, error=first_line(error)
            )
        finally:
            if handle.in_doubt:
                self.orphans.suspect(f"engine {handle.rank} may still exist: Ray has not answered")

    def _tag(self, version: Version) -> str:
        contact = self._coordinator.contact
        assert contact is not None, "the coordinator must be opened first"
        return actor_names.engine_tag(version.weights_lineage, contact.keys.public.hex())


def _cancel_watcher(handle: EngineHandle) -> None:
    if handle.exit_watcher is not None and handle.exit_watcher is not asyncio.current_task():
        handle.exit_watcher.cancel()


def _explain(error: BaseException, handle: EngineHandle) -> StartFailed:
    rank, version = handle.rank, handle.version
    assert version is not None
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, ConfigError | ValueError | FileNotFoundError):
        return StartFailed(str(cause), permanent=True)
    if isinstance(error, TimeoutError) and not isinstance(error, GcsUnavailable):
        return StartFailed(
            f"engine {rank} was not ready after cluster.start_timeout_s="
            f"{version.config.cluster.start_timeout_s:g}: it hangs, or its weights load too slowly",
            permanent=False,
        )
    if isinstance(cause, ActorDied | ActorUnavailable):
        return StartFailed(f"engine {rank} did not start: its process terminated", permanent=False)
    text = (str(cause).strip().splitlines() or [""])[-1]
    reason = f"engine {rank} did not start: {type(cause).__name__}: {text}"
    return StartFailed(reason, permanent=False)
