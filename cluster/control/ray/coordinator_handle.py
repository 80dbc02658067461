"""The actor of the coordinator: created once, watched, restarted. No decisions.

Its keys, name and port are chosen once and stored (`checkpoint_store.py`). It stays on the machine
of the manager that created it as long as that machine exists: engines and ingresses find a
successor at the address of its predecessor, or else through Ray
(`coordinator/transport/finder.py`). Ray repeats calls that were in progress when the actor died, so
a caller does not see its death, only a longer wait. A coordinator that hangs does not answer, and
is killed; then the same applies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar

from swell.cluster.control.ray.actor_errors import (
    ActorDied,
    ActorRaised,
    ActorUnavailable,
    GcsUnavailable,
)
from swell.cluster.control.ray.checkpoint_store import CheckpointStore
from swell.cluster.control.ray.ray_interface import Actor, RayInterface
from swell.configs.runtime.log import StructuredLogger, first_line
from swell.configs.schema import Config
from swell.coordinator.manager_state import ManagerId, ManagerState, NotLeading
from swell.coordinator.roster import Member, Roster
from swell.coordinator.service import Membership
from swell.coordinator.state_machine import JoinResult
from swell.coordinator.transport.coordinator_contact import CoordinatorContact
from swell.coordinator.wire import ClusterView

T = TypeVar("T")

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 5.0
"""Delays between attempts to reach the successor of a coordinator whose host is lost."""


class CoordinatorHandle:
    """The coordinator of one cluster. The methods call the coordinator's methods of the same
    name."""

    def __init__(
        self,
        config: Config,
        namespace: str,
        checkpoints: CheckpointStore,
        ray: RayInterface,
        manager_id: Callable[[], ManagerId],
    ) -> None:
        """`manager_id`: returns the manager that sends these commands."""
        self.name = f"coordinator-{checkpoints.cluster_id}"
        """Name of its actor. Engines with another configuration have another coordinator."""
        self._config = config
        self._namespace = namespace
        self._checkpoints = checkpoints
        self._ray = ray
        self._actor: Actor | None = None
        self._probe_lock = asyncio.Lock()
        self._contact_lock = asyncio.Lock()
        """Held during a call of `contact`, so that no earlier answer replaces a later one."""
        self._patience_s = config.cluster.stall_timeout_s
        """How long the next successor may take to start and to answer."""
        self._starts_until = 0.0
        """Until when the newest successor may be starting, by the clock of the event loop."""
        self._restarts = 0
        self._log = StructuredLogger("cluster.coordinator")
        self.contact: CoordinatorContact | None = None
        self.manager_id = manager_id

    @property
    def pid(self) -> int | None:
        return self.contact.pid if self.contact else None

    async def open(self) -> None:
        """Finds or creates the coordinator. A new one takes the endpoint of its predecessor."""
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

    async def view_and_contact(self) -> ClusterView:
        """Returns the view, and sets `contact` to the coordinator that runs now: at once, also
        while it is recovering."""
        view, _ = await asyncio.gather(self.view(), self._refresh_contact())
        return view

    async def wait(self, epoch: int, timeout_s: float) -> Membership:
        """Returns the membership once its epoch is not `epoch`, or after the timeout."""
        result: Membership = await self._call(self._send("wait", epoch, timeout_s), timeout_s)
        await self._refresh_contact()
        return result

    async def join(
        self,
        members: Callable[[], list[Member]],
        ended: Collection[int],
        dead: Callable[[], dict[int, str]],
    ) -> dict[int, str]:
        """Adds members, and removes earlier incarnations of their ranks: those that the coordinator
        lists, and `ended`, which it may list later. `members`: returns them as they are now: one
        that begins to leave meanwhile joins as a leaving one. `dead`: returns the members that have
        terminated, with the reason, by rank; they are not added. Returns when each member is in the
        roster or has been refused: why, by rank. If the coordinator is lost meanwhile, they join
        its successor. Like all methods that change the roster, raises NotLeading if a manager other
        than this one leads."""
        limit_s = self._config.cluster.start_timeout_s
        ranks = [member.rank for member in members()]
        own = {member.incarnation for member in members()}

        async def join_now() -> JoinResult:
            # A coordinator that restarts lists every engine that reports to it, also one that is
            # about to end, or that an earlier manager has ended.
            roster = (await self.view()).roster
            terminated = dead()  # the last moment: nobody removes a member that dies before
            living = [member for member in members() if member.rank not in terminated]
            if not living:
                return JoinResult(roster, terminated)
            listed = {found.incarnation for rank in ranks if (found := roster.find(rank))}
            earlier = sorted((listed | {*ended}) - own)
            joining = self._send("join", living, limit_s, self.manager_id(), earlier)
            result: JoinResult = await joining
            return JoinResult(result.roster, result.refused | terminated)

        result = await self._call_successors(join_now, limit_s)
        joined = [rank for rank in ranks if rank not in result.refused]
        self._log.info("joined", epoch=result.roster.epoch, ranks=joined, refused=result.refused)
        return result.refused

    async def leave(self, ranks: list[int]) -> int:
        """Marks engines as leaving. Returns the epoch of a roster that says so."""
        call = self._send("leave", ranks, self.manager_id())
        return (await self._change_roster("leaving", ranks, call)).epoch

    async def cancel_leave(self, ranks: list[int]) -> None:
        call = self._send("cancel_leave", ranks, self.manager_id())
        await self._change_roster("staying", ranks, call)

    async def detach(self, ranks: list[int], idle_epoch: int | None = None) -> Roster:
        """Removes engines and returns the roster without them. `idle_epoch`: epoch of the roster
        under which they were found idle; the coordinator removes none of them if it has a newer
        roster."""
        limit_s = self._config.cluster.start_timeout_s
        call = self._send("detach", ranks, limit_s, self.manager_id(), idle_epoch)
        return await self._change_roster("detached", ranks, call, limit_s)

    async def remove_failed(self, ranks: list[int], incarnations: list[int] | None = None) -> None:
        """Removes dead engines; with `incarnations` only these. The call may reach a successor of
        the coordinator, which may list another engine of the rank."""
        call = self._send("remove_failed", ranks, self.manager_id(), incarnations)
        await self._change_roster("removed", ranks, call)

    async def _change_roster(
        self, event: str, ranks: list[int], call: Awaitable[Roster], limit_s: float = 0.0
    ) -> Roster:
        roster = await self._call_as_manager(call, limit_s)
        self._log.info(event, epoch=roster.epoch, ranks=ranks)
        return roster

    async def pause(self) -> None:
        await self._call_as_manager(self._send("pause", self.manager_id()))

    async def resume(self) -> None:
        await self._call_as_manager(self._send("resume", self.manager_id()))

    async def _call_as_manager(self, call: Awaitable[T], limit_s: float = 0.0) -> T:
        try:
            return await self._call(call, limit_s)
        except ActorRaised as error:
            if isinstance(error.cause, NotLeading):
                raise error.cause from None
            raise

    async def _call_successors(self, send: Callable[[], Awaitable[T]], limit_s: float) -> T:
        """Returns the answer of this coordinator or, if it is lost within `limit_s` seconds, of the
        next one, which `open` finds. The call may run twice."""
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
        """Sends the state without waiting. The next `Membership` shows whether the coordinator kept
        it."""
        self._send("save_manager_state", state)

    async def _refresh_contact(self) -> None:
        async with self._contact_lock:
            contact = await self._call(self._send("contact"))
            if self.contact is not None and contact.pid != self.contact.pid:
                self._restarts += 1
                self._log.warning("coordinator restarted", pid=contact.pid, restarts=self._restarts)
            self.contact = contact

    def _send(self, method: str, *args: Any) -> Awaitable[Any]:
        return self._ray.call(self._actor, method, *args)

    async def _call(self, call: Awaitable[T], call_timeout_s: float = 0.0) -> T:
        """Returns the answer of a call that may take `call_timeout_s`, even if the coordinator must
        be restarted several times."""
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
        """Kills the coordinator if it does not answer a second call either: perhaps only the
        waiting manager was suspended. The successor has `stall_timeout_s` to answer, and each
        further one twice as long, up to `start_timeout_s`, because it may hang too or its machine
        may be slow. A manager that cannot reach Ray's GCS may be cut off, so it does not kill: Ray
        would carry that out much later and kill a coordinator that serves."""
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
        """Resets the time for the next successor: this coordinator has started, so later silence is
        not a slow start."""
        self._patience_s, self._starts_until = self._config.cluster.stall_timeout_s, 0.0
