"""The coordinator's actor: made once, watched, started again. No decisions.

Its keys, its name and its port are chosen once and kept (`checkpoint_store.py`), and it stays on
the machine of the manager that made it, as long as there is that machine: a successor is found
where its predecessor was, and else through Ray (`coordinator/finder.py`). Ray repeats calls that
were under way when it died, so a caller sees no death, only a longer wait. One that was stopped
answers nothing, and is killed: the rest is as above.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from swell.cluster.control.actor_errors import (
    ActorDied,
    ActorRaised,
    ActorUnavailable,
    GcsUnavailable,
)
from swell.cluster.control.checkpoint_store import CheckpointStore
from swell.cluster.control.ray_port import Actor, RayPort
from swell.configs.log import StructuredLogger, first_line
from swell.configs.schema import Config
from swell.coordinator.contact import CoordinatorContact
from swell.coordinator.manager_state import ManagerId, ManagerState, NotLeading
from swell.coordinator.roster import Member, Roster
from swell.coordinator.service import Membership
from swell.coordinator.state_machine import JoinResult
from swell.coordinator.wire import ClusterView

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 5.0
"""Between attempts to reach the successor of a coordinator whose host is lost."""


class CoordinatorHandle:
    """The coordinator of one cluster. Its methods are the coordinator's own."""

    def __init__(
        self, config: Config, namespace: str, checkpoints: CheckpointStore, ray: RayPort
    ) -> None:
        self.name = f"coordinator-{checkpoints.identity}"
        """Of its actor; engines of another configuration have another coordinator."""
        self._config = config
        self._namespace = namespace
        self._checkpoints = checkpoints
        self._ray = ray
        self._actor: Actor | None = None
        self._probe_lock = asyncio.Lock()
        self._patience_s = config.cluster.stall_timeout_s
        """How long the next successor may take to start and to answer."""
        self._starts_until = 0.0
        """Until when the newest successor may be starting, by the loop's clock."""
        self._restarts = 0
        self._log = StructuredLogger("cluster.coordinator")
        self.contact: CoordinatorContact | None = None
        self.manager_id: Callable[[], ManagerId] = ManagerId
        """The manager whose commands these are."""

    @property
    def pid(self) -> int | None:
        return self.contact.pid if self.contact else None

    async def open(self) -> None:
        """Find the coordinator, or make it; one that was ended takes its predecessor's place."""
        fresh = self._ray.new_endpoint()
        endpoint = await self._checkpoints.endpoint(lambda: fresh)
        self._actor = await self._ray.get_or_create_coordinator(
            self.name,
            self._namespace,
            self._config.cluster,
            lockstep=self._config.parallel.expert,
            endpoint=endpoint,
            inherited=endpoint != fresh,
        )
        await self._refresh_contact()

    async def close(self) -> None:
        if self._actor is not None:
            await self._ray.kill(self._actor)

    async def view(self) -> ClusterView:
        view: ClusterView = await self._call(self._send("view"))
        return view

    async def wait(self, epoch: int, timeout_s: float) -> Membership:
        """The cluster, when it is no longer of `epoch`, or after the time."""
        result: Membership = await self._call(self._send("wait", epoch, timeout_s), timeout_s)
        await self._refresh_contact()
        return result

    async def join(self, members: list[Member]) -> dict[int, str]:
        """Returns when each is in the roster or will never be: why those that will not, by rank. If
        the coordinator is lost meanwhile, they join its successor.
        Raises `ActorError` for a rank that is taken. As all that change the roster this raises
        NotLeading if another manager than `manager_id` leads."""
        limit_s, ranks = self._config.cluster.start_timeout_s, [member.rank for member in members]
        result: JoinResult = await self._call_successors(
            lambda: self._send("join", members, limit_s, self.manager_id()), limit_s
        )
        joined = [rank for rank in ranks if rank not in result.refused]
        self._log.info("joined", epoch=result.roster.epoch, ranks=joined, refused=result.refused)
        return result.refused

    async def leave(self, ranks: list[int]) -> int:
        """The epoch of a roster in which these engines are leaving."""
        call = self._send("leave", ranks, self.manager_id())
        return (await self._change_roster("leaving", ranks, call)).epoch

    async def cancel_leave(self, ranks: list[int]) -> None:
        call = self._send("cancel_leave", ranks, self.manager_id())
        await self._change_roster("staying", ranks, call)

    async def detach(self, ranks: list[int], idle_epoch: int | None = None) -> Roster:
        """The roster without these engines. `idle_epoch`: of the roster under which they were found
        idle; the coordinator takes none of them out if it has a newer one."""
        limit_s = self._config.cluster.start_timeout_s
        call = self._send("detach", ranks, limit_s, self.manager_id(), idle_epoch)
        return await self._change_roster("detached", ranks, call, limit_s)

    async def remove_failed(self, ranks: list[int]) -> None:
        await self._change_roster(
            "removed", ranks, self._send("remove_failed", ranks, self.manager_id())
        )

    async def _change_roster(
        self, event: str, ranks: list[int], call: Awaitable[Any], limit_s: float = 0.0
    ) -> Roster:
        roster: Roster = await self._call_as_manager(call, limit_s)
        self._log.info(event, epoch=roster.epoch, ranks=ranks)
        return roster

    async def pause(self) -> None:
        await self._call_as_manager(self._send("pause", self.manager_id()))

    async def resume(self) -> None:
        await self._call_as_manager(self._send("resume", self.manager_id()))

    async def _call_as_manager(self, call: Awaitable[Any], limit_s: float = 0.0) -> Any:
        try:
            return await self._call(call, limit_s)
        except ActorRaised as error:
            if isinstance(error.cause, NotLeading):
                raise error.cause from None
            raise

    async def _call_successors(self, send: Callable[[], Awaitable[Any]], limit_s: float) -> Any:
        """The answer of this coordinator, or, if that is lost within `limit_s` seconds, of the next
        one, which `open` finds. The call may run twice."""
        loop = asyncio.get_running_loop()
        deadline, pause_s = loop.time() + limit_s, _FIRST_PAUSE_S
        while True:
            try:
                return await self._call_as_manager(send(), limit_s)
            except (ActorDied, ActorUnavailable, GcsUnavailable):
                if loop.time() + pause_s > deadline:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2.0 * pause_s, _LONGEST_PAUSE_S)

    async def membership(self) -> Membership:
        membership: Membership = await self._call(self._send("membership"))
        return membership

    async def take_over(self, state: ManagerState) -> None:
        """Returns when the manager with this state leads, or one that took over after it."""
        await self._call(self._send("save_manager_state", state))

    def save_manager_state(self, state: ManagerState) -> None:
        """Send it; whether it was kept is seen in the next `Membership`."""
        self._send("save_manager_state", state)

    async def _refresh_contact(self) -> None:
        contact = await self._call(self._send("contact"))
        if self.contact is not None and contact.pid != self.contact.pid:
            self._restarts += 1
            self._log.warning("coordinator restarted", pid=contact.pid, restarts=self._restarts)
        self.contact = contact

    def _send(self, method: str, *args: Any) -> Awaitable[Any]:
        return self._ray.call(self._actor, method, *args)

    async def _call(self, call: Awaitable[Any], call_timeout_s: float = 0.0) -> Any:
        """The answer of a call that may take `call_timeout_s`, however often it must be
        restarted."""
        answer = asyncio.ensure_future(call)
        try:
            while True:
                limit_s = call_timeout_s + self._config.cluster.stall_timeout_s
                done, _ = await asyncio.wait({answer}, timeout=limit_s)
                if done:
                    result = answer.result()
                    self._on_answer()
                    return result
                await self._kill_if_unresponsive()
        finally:
            answer.cancel()

    async def _kill_if_unresponsive(self) -> None:
        """Kill it if it does not answer a second call: the caller that waited may have been stopped
        itself. Its successor has `stall_timeout_s` to answer, and each further one twice as long,
        up to `start_timeout_s`: it may be stopped, too, or its machine is slow. A manager that does
        not reach Ray's GCS is perhaps cut off, and kills none: Ray would do it much later, and end
        a coordinator that serves."""
        loop, limits = asyncio.get_running_loop(), self._config.cluster
        async with self._probe_lock:
            try:
                await self._checkpoints.read()
            except Exception as error:
                self._log.warning("coordinator is silent, and so is Ray", error=first_line(error))
                return
            wait_s = max(1.0 + 2 * limits.heartbeat_s, self._starts_until - loop.time())
            try:
                async with asyncio.timeout(wait_s):
                    await self._send("probe")  # `wait_for` may swallow `stop`
                self._on_answer()
            except TimeoutError:
                self._log.warning("coordinator is silent: killed", pid=self.pid)
                await self._ray.kill(self._actor, restart=True)
                self._starts_until = loop.time() + self._patience_s
                longest_s = max(limits.start_timeout_s, limits.stall_timeout_s)
                self._patience_s = min(2.0 * self._patience_s, longest_s)

    def _on_answer(self) -> None:
        """It has started: one that is silent later is no successor that starts."""
        self._patience_s, self._starts_until = self._config.cluster.stall_timeout_s, 0.0
