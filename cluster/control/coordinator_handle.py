"""The coordinator's actor: made once, watched, started again. No decisions.

Its keys, its name and its port are chosen once and kept (`checkpoint_store.py`), and it stays on
the machine of the manager that made it: a successor is found where its predecessor was. Ray repeats
calls that were under way when it died, so a caller sees no death, only a longer wait. One that was
stopped answers nothing, and is killed: the rest is as above.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any

from swell.cluster.control.checkpoint_store import CheckpointStore
from swell.cluster.control.ray_port import Actor, RayPort
from swell.configs.log import StructuredLogger
from swell.configs.schema import Config
from swell.coordinator.contact import CoordinatorContact
from swell.coordinator.roster import Member
from swell.coordinator.service import ManagerState, Membership
from swell.coordinator.wire import ClusterView


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
        self._restarts = 0
        self._log = StructuredLogger("cluster.coordinator")
        self.contact: CoordinatorContact | None = None

    @property
    def pid(self) -> int | None:
        return self.contact.pid if self.contact else None

    async def open(self) -> None:
        """Find the coordinator, or make it; one that was ended takes its predecessor's place."""
        fresh = self._ray.new_endpoint()
        endpoint = await self._checkpoints.endpoint(lambda: fresh)
        self._actor = self._ray.get_or_create_coordinator(
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
            self._ray.kill(self._actor)

    async def view(self) -> ClusterView:
        view: ClusterView = await self._call(self._send("view"))
        return view

    async def wait(self, epoch: int, timeout_s: float) -> Membership:
        """The cluster, when it is no longer of `epoch`, or after the time."""
        result: Membership = await self._call(self._send("wait", epoch, timeout_s), timeout_s)
        await self._refresh_contact()
        return result

    async def join(self, members: list[Member]) -> None:
        """Raises RuntimeError if their group does not form; the roster is as before then."""
        limit_s = self._config.cluster.start_timeout_s
        call = self._send("join", members, limit_s)
        await self._change_roster("joined", [member.rank for member in members], call, limit_s)

    async def leave(self, ranks: list[int]) -> None:
        await self._change_roster("leaving", ranks, self._send("leave", ranks))

    async def cancel_leave(self, ranks: list[int]) -> None:
        await self._change_roster("staying", ranks, self._send("cancel_leave", ranks))

    async def detach(self, ranks: list[int]) -> None:
        limit_s = self._config.cluster.start_timeout_s
        call = self._send("detach", ranks, limit_s)
        await self._change_roster("detached", ranks, call, limit_s)

    async def remove_failed(self, ranks: list[int]) -> None:
        await self._change_roster("removed", ranks, self._send("remove_failed", ranks))

    async def _change_roster(
        self, event: str, ranks: list[int], call: Awaitable[Any], limit_s: float = 0.0
    ) -> None:
        roster = await self._call(call, limit_s)
        self._log.info(event, epoch=roster.epoch, ranks=ranks)

    async def pause(self) -> None:
        await self._call(self._send("pause"))

    async def resume(self) -> None:
        await self._call(self._send("resume"))

    async def take_over(self, owner: str) -> None:
        await self._call(self._send("take_over", owner))

    def note(self, note: ManagerState) -> None:
        """Send it; whether it was kept is seen in the next `Membership`."""
        self._send("note", note)

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
                    return answer.result()
                await self._kill_if_unresponsive()
        finally:
            answer.cancel()

    async def _kill_if_unresponsive(self) -> None:
        """Kill it if it does not answer a second call: the caller that waited may have been stopped
        itself. Its successor has as long to answer: it may be stopped, too."""
        async with self._probe_lock:
            try:
                limit_s = 1.0 + 2 * self._config.cluster.heartbeat_s
                await asyncio.wait_for(self._send("view"), limit_s)
            except TimeoutError:
                self._log.warning("coordinator is silent: killed", pid=self.pid)
                self._ray.kill(self._actor, restart=True)
                with contextlib.suppress(TimeoutError):
                    limit_s = self._config.cluster.stall_timeout_s
                    await asyncio.wait_for(self._send("view"), limit_s)
