"""Terminates actors and placement groups that no manager knows.

A terminated engine may still exist: Ray's GCS was unavailable, or the manager was cancelled while
Ray created the engine. The collector handles everything that is in doubt, and retries with a
growing delay. A call of an earlier manager may reach Ray long after that manager died, when a
network partition heals, so the collector also checks periodically.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

from swell.cluster.control.cluster_status import Leftovers
from swell.cluster.control.engines import actor_names
from swell.cluster.control.plan.backoff import delay_s
from swell.cluster.control.ray.ray_interface import Group, RayInterface
from swell.configs.runtime.log import StructuredLogger, first_line

_TIMEOUT_S = 15.0
"""How long terminated orphans may take to disappear."""
_POLL_S = 0.1


class OrphanCollector:
    """Terminates everything with a name of one cluster that its manager does not know: engines of
    an earlier manager or of another configuration, and placement groups whose engines are dead."""

    def __init__(
        self,
        ray: RayInterface,
        namespace: str,
        known: Callable[[], Collection[str]],
        may_end: Callable[[], Awaitable[bool]],
        period_s: float,
    ) -> None:
        """`known`: returns the names that the manager knows; `may_end`: whether no other manager
        has taken over; `period_s`: time between two periodic checks."""
        self._may_end = may_end
        self._period_s = period_s
        self._ray = ray
        self._namespace = namespace
        self._known = known
        self._due = asyncio.Event()
        """There may be orphans."""
        self._left: list[str] = []
        """Names of the orphans at the last check."""
        self._reason = ""
        """Why orphans may be left."""
        self._failures = 0
        """Failed collections in a row."""
        self._next_try = 0.0
        """When the next attempt starts, by the clock of the event loop."""
        self._log = StructuredLogger("cluster.placement")

    @property
    def is_done(self) -> bool:
        """Whether no known orphans are left."""
        return not self._due.is_set() and not self._failures

    def leftovers(self) -> Leftovers | None:
        """Returns the orphans that may still hold resources; None: there are none."""
        if self.is_done:
            return None
        wait_s = max(0.0, self._next_try - asyncio.get_running_loop().time())
        return Leftovers(list(self._left), self._reason, self._failures, wait_s)

    def suspect(self, reason: str) -> None:
        """Reports that orphans may be left: `collect_forever` terminates them."""
        self._reason = reason
        self._due.set()

    async def collect_forever(self) -> None:
        """Terminates orphans whenever some may be left, and retries until none is."""
        while True:
            try:
                await asyncio.wait_for(self._due.wait(), self._period_s)
            except TimeoutError:
                if not await self._has_some():
                    continue
            await self.collect()
            if self._due.is_set():
                wait_s = delay_s(self._failures)
                self._next_try = asyncio.get_running_loop().time() + wait_s
                await asyncio.sleep(wait_s)

    async def _has_some(self) -> bool:
        """Whether there are orphans. False if Ray does not answer."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                actors = await self._ray.actor_names(self._namespace)
                groups = await self._ray.groups()
        except Exception:  # the next check may succeed
            return False
        return bool(actor_names.find_orphans(actors, groups, self._namespace, self._known()))

    async def collect(self) -> bool:
        """Terminates all orphans, and waits for some seconds until they are gone. Returns whether
        there were any. If some are left, or if the GCS does not answer, `collect_forever`
        continues."""
        ended: set[str] = set()
        self._due.clear()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                while await self._end_orphans(ended):
                    await asyncio.sleep(_POLL_S)
        except asyncio.CancelledError:
            self._due.set()  # no other task knows about the remaining orphans
            raise
        except Exception as error:  # retried after any error
            self._failures += 1
            self.suspect(
                first_line(error) if str(error) else f"not terminated within {_TIMEOUT_S:g} s"
            )
            self._log.warning("orphans are left", names=self._left, reason=self._reason)
        else:
            self._failures = 0
        return bool(ended)

    async def _end_orphans(self, ended: set[str]) -> bool:
        """Terminates each orphan once and adds its name to `ended`. Returns whether some are still
        there."""
        actors = await self._ray.actor_names(self._namespace)
        groups = await self._ray.groups()
        # Read the known names last: an engine may have been planned meanwhile.
        self._left = actor_names.find_orphans(actors, groups, self._namespace, self._known())
        # They do not contain the engines of a manager that has taken over since.
        if self._left and not await self._may_end():
            return False
        for name in self._left:
            if name not in ended:
                self._log.warning(
                    "orphan terminated", name=name, actor=name in actors, group=name in groups
                )
                await end(self._ray, name, self._namespace, groups.get(name))
                ended.add(name)
        return bool(self._left)


async def end(ray: RayInterface, name: str, namespace: str, group: Group | None) -> None:
    """Terminates the actor with this name, if there is one, and this placement group."""
    actor = await ray.find_actor(name, namespace)
    if actor is not None:
        await ray.kill(actor)
    if group is not None:
        await ray.remove_group(group)


async def end_all(ray: RayInterface, namespace: str) -> list[str]:
    """Terminates everything of an application that no longer has a manager. Returns the names."""
    actors, groups = await ray.actor_names(namespace), await ray.groups()
    names = actor_names.find_orphans(actors, groups, namespace)
    for name in names:
        await end(ray, name, namespace, groups.get(name))
    return names
