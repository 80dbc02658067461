"""The state of a cluster over HTTP, and whether it is at full capacity."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection

from swell.cluster.api.admin.protocol import Accepted, ClusterState, Readiness
from swell.cluster.cli.http_client import Client, ServerError
from tests.faults.process import Cluster, alive

_POLL_S = 0.1
_POST_S = 30.0
_GET_S = 5.0
"""A slower answer counts as no answer."""

INGRESS, MANAGER, STORE, CONTROLLER = (
    "ServeReplica:swell:Ingress",
    "ServeReplica:swell:Manager",
    "ServeReplica:swell:Store",
    "ServeContr",
)
"""Parts of the titles that Ray gives to processes which `/admin/cluster` does not name."""
_TITLES = (INGRESS, MANAGER, STORE, CONTROLLER)


class NotReached(RuntimeError):
    """An expected state did not occur."""


class AlreadyPassed(NotReached):
    """The state was over before it could be observed."""


class ClusterMonitor:
    """Polls one cluster through an ingress that answers."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._clients = [Client(url, timeout_s=_GET_S) for url in cluster.urls]
        """The ingress that answered last is the first."""
        self._counts = {part: len(cluster.named(part)) for part in _TITLES}
        """The number of processes of each title in the healthy cluster."""

    def replicas(self) -> list[int]:
        """Returns the processes that Ray Serve supervises."""
        return [pid for part in (INGRESS, MANAGER, STORE) for pid in self.cluster.named(part)]

    async def get_state(self) -> ClusterState | None:
        """Returns the result of `GET /admin/cluster`; None without an answer."""
        for client in list(self._clients):
            try:
                state = await client.get("/admin/cluster", ClusterState)
            except ServerError:
                continue
            self._clients.sort(key=lambda other: other is not client)
            return state
        return None

    async def wait_for_state(self, limit_s: float) -> ClusterState:
        """Returns the state as soon as there is an answer. Raises NotReached."""
        deadline = time.monotonic() + limit_s
        while (state := await self.get_state()) is None:
            if time.monotonic() > deadline:
                raise NotReached("no answer from /admin/cluster")
            await asyncio.sleep(_POLL_S)
        return state

    async def counter(self, name: str) -> float:
        """Returns a metric, summed over its labels; 0 if it is not reported."""
        try:
            async with self._clients[0].open("GET", "/metrics") as response:
                lines = (await response.read()).decode().splitlines()
        except ServerError:
            return 0.0
        starts = (f"{name} ", f"{name}{{")
        return sum(float(line.split()[-1]) for line in lines if line.startswith(starts))

    async def post(self, path: str, body: dict[str, object]) -> None:
        """Requests a change with POST. Raises NotReached if it is refused."""
        url = self._clients[0].url
        try:
            await Client(url, timeout_s=_POST_S).post(path, body, Accepted)
        except ServerError as error:
            raise NotReached(f"{path} {body}: {error}") from None

    async def until_whole(
        self, targets: Collection[int], limit_s: float, victims: Collection[int] = ()
    ) -> ClusterState:
        """Waits for full capacity: `targets` engines, all active and stable, without `victims`. A
        failed growth is stable at its former size, if that is one of the targets.

        Raises NotReached with what is missing.
        """
        deadline = time.monotonic() + limit_s
        while missing := await self._missing(targets, victims):
            if time.monotonic() > deadline:
                raise NotReached(f"after {limit_s:g} s: {missing}")
            await asyncio.sleep(_POLL_S)
        state = await self.get_state()
        return state or await self.until_whole(targets, limit_s, victims)

    async def _missing(self, targets: Collection[int], victims: Collection[int]) -> str | None:
        if living := [victim for victim in victims if alive(victim)]:
            return f"processes {living} are still there"
        state = await self.get_state()
        if state is None:
            return "no answer from /admin/cluster"
        states = [engine.state for engine in state.engines]
        if state.target not in targets or len(states) != state.target:
            return f"{len(states)} engines, target {state.target}, wanted {sorted(targets)}"
        went_back = state.target < max(targets) and state.rescale.phase == "failed"
        at_rest = state.state == "serving" and (went_back or state.rescale.phase == "idle")
        if set(states) != {"active"} or not at_rest:
            return f"engines {states}, state {state.state}, rescale {state.rescale}"
        if (listed := set(victims) & set(pids(state))) or state.coordinator.pid is None:
            return f"processes {listed} are still listed, coordinator {state.coordinator.pid}"
        if not set(pids(state)) <= {pid for pid in pids(state) if alive(pid)}:
            return f"a listed process is gone: {pids(state)}"
        counts = {part: len(self.cluster.named(part)) for part in _TITLES}
        if counts != self._counts:
            return f"processes {counts}, were {self._counts}"
        listening = self.cluster.listeners()
        if listening != counts[INGRESS]:
            return f"{listening} of {counts[INGRESS]} ingresses listen"
        return await self._not_ready()

    async def _not_ready(self) -> str | None:
        for client in self._clients:
            try:
                await client.get("/ready", Readiness)
            except ServerError as error:
                return f"{client.url}/ready: {error}"
        return None


def pids(state: ClusterState) -> list[int]:
    """Returns every process that `/admin/cluster` names: engines, workers and the coordinator."""
    found = {state.coordinator.pid, *(engine.pid for engine in state.engines)}
    found |= {worker.pid for engine in state.engines for worker in engine.workers}
    return sorted(pid for pid in found if pid is not None)
