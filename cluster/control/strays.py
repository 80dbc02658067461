"""How actors and placement groups that no manager knows are ended.

An engine that was ended may still be there: Ray's GCS was away, or the manager was cancelled while
Ray made it. Whatever is in doubt is left to the collector. What cannot be ended now is tried again,
ever more slowly. A call of an earlier manager may reach Ray long after that one has died, when a
network that was cut is whole again: so the collector looks from time to time without a reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

from swell.cluster.control import actor_names
from swell.cluster.control.backoff import delay_s
from swell.cluster.control.cluster_status import Leftovers
from swell.cluster.control.ray_port import Group, RayPort
from swell.configs.log import StructuredLogger, first_line

_TIMEOUT_S = 15.0
"""How long strays that were ended may take to be gone."""
_POLL_S = 0.1


class StrayCollector:
    """Ends everything with a name of one cluster that its manager does not know: engines of an
    earlier manager, or of another configuration, and placement groups whose engines are dead."""

    def __init__(
        self,
        ray: RayPort,
        namespace: str,
        known: Callable[[], Collection[str]],
        may_end: Callable[[], Awaitable[bool]],
        period_s: float,
    ) -> None:
        """`may_end`: whether no other manager has taken over; `period_s`: between two looks without
        a reason."""
        self._may_end = may_end
        self._period_s = period_s
        self._ray = ray
        self._namespace = namespace
        self._known = known
        self._due = asyncio.Event()
        """There may be some."""
        self._left: list[str] = []
        """Names that were there last."""
        self._reason = ""
        """Why some may be left."""
        self._failures = 0
        """In a row."""
        self._next_try = 0.0
        """By the clock of the event loop."""
        self._log = StructuredLogger("cluster.placement")

    @property
    def is_done(self) -> bool:
        """Nothing that is known of is left."""
        return not self._due.is_set() and not self._failures

    def leftovers(self) -> Leftovers | None:
        """What may still hold resources."""
        if self.is_done:
            return None
        wait_s = max(0.0, self._next_try - asyncio.get_running_loop().time())
        return Leftovers(list(self._left), self._reason, self._failures, wait_s)

    def suspect(self, reason: str) -> None:
        """Some may be left: `collect_forever` ends them."""
        self._reason = reason
        self._due.set()

    async def collect_forever(self) -> None:
        """End what may be left, and try again until nothing is."""
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
        """Whether there are any, as far as Ray answers: where it does not, none is suspected."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                actors = await self._ray.actor_names(self._namespace)
                groups = await self._ray.groups()
        except Exception:  # whatever Ray says, the next look may succeed
            return False
        return bool(actor_names.find_strays(actors, groups, self._namespace, self._known()))

    async def collect(self) -> bool:
        """End all, and wait for some seconds until they are gone. Returns whether there were any.
        If some are left then, or if the GCS does not answer, `collect_forever` goes on."""
        ended: set[str] = set()
        self._due.clear()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                while await self._end_strays(ended):
                    await asyncio.sleep(_POLL_S)
        except asyncio.CancelledError:
            self._due.set()  # whatever is left, no other task looks for it
            raise
        except Exception as error:  # whatever Ray says, it is tried again
            self._failures += 1
            self.suspect(first_line(error) if str(error) else f"not gone within {_TIMEOUT_S:g} s")
            self._log.warning("strays are left", names=self._left, reason=self._reason)
        else:
            self._failures = 0
        return bool(ended)

    async def _end_strays(self, ended: set[str]) -> bool:
        """End each once, add their names to `ended`; whether some are still there."""
        actors = await self._ray.actor_names(self._namespace)
        groups = await self._ray.groups()
        # What is known is read after them: an engine may have been planned meanwhile.
        self._left = actor_names.find_strays(actors, groups, self._namespace, self._known())
        # And of a manager that has taken over since, they have nothing.
        if self._left and not await self._may_end():
            return False
        for name in self._left:
            if name not in ended:
                self._log.warning(
                    "stray ended", name=name, actor=name in actors, group=name in groups
                )
                await end(self._ray, name, self._namespace, groups.get(name))
                ended.add(name)
        return bool(self._left)


async def end(ray: RayPort, name: str, namespace: str, group: Group | None) -> None:
    """End the actor of this name, if there is one, and this placement group."""
    actor = await ray.find_actor(name, namespace)
    if actor is not None:
        await ray.kill(actor)
    if group is not None:
        await ray.remove_group(group)


async def end_all(ray: RayPort, namespace: str) -> list[str]:
    """End everything of an application that has no manager any more. Returns the names."""
    actors, groups = await ray.actor_names(namespace), await ray.groups()
    names = actor_names.find_strays(actors, groups, namespace)
    for name in names:
        await end(ray, name, namespace, groups.get(name))
    return names
