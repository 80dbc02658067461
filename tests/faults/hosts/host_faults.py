"""Faults of hosts and their links: a host loses its power and comes back; its link is down, passes
one direction only, or is slow; or only its connection to Ray's head is cut.

Each fault hits a host with engines (`-host`), the one of these with coordinator and manager
(`-control-host`), or the one with Ray's GCS, Serve's controller and `swell serve` (`-head`).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from functools import partial
from typing import Literal

from swell.cluster.api.admin.protocol import ClusterState
from tests.faults.cluster_monitor import MANAGER, ClusterMonitor, NotReached
from tests.faults.fault_types import Fault, FaultEffect
from tests.faults.hosts.host_cluster import HostCluster
from tests.faults.hosts.hosts import Hosts

HEAD = 0
ENGINE_HOSTS = (1, 2)
_LASTS_S = 6.0
"""Twice the `cluster.stall_timeout_s` of the set-ups."""
_PARTS_S = (6, 15, 40)
"""The seconds for which a host and the head cannot reach each other."""
_OFF_S = 3.0
"""The seconds for which a host is without power; its Ray needs some more to start."""
_MOVES = 10
_WHOLE_S = 60.0

Pick = Callable[[HostCluster, ClusterState, random.Random], int]
Begin = Callable[[Hosts, int, random.Random], str]
End = Callable[[Hosts, int], None]


# ---------------------------------------------------------------- which host


def _cluster(monitor: ClusterMonitor) -> HostCluster:
    if not isinstance(monitor.cluster, HostCluster):
        raise NotReached("this cluster has one host")
    return monitor.cluster


def _head(_cluster: HostCluster, _state: ClusterState, _rng: random.Random) -> int:
    return HEAD


def _with_control(cluster: HostCluster, state: ClusterState, _rng: random.Random) -> int:
    host = cluster.host_of(state.coordinator.pid)
    if host not in ENGINE_HOSTS:
        raise NotReached(f"the coordinator is on host {host}")
    return host


def _without_control(cluster: HostCluster, state: ClusterState, rng: random.Random) -> int:
    control = cluster.host_of(state.coordinator.pid)
    return rng.choice([host for host in ENGINE_HOSTS if host != control])


async def _move_control(monitor: ClusterMonitor) -> None:
    """Moves manager and coordinator to a host with engines: managers are killed until Serve places
    one there, and its coordinator follows. Raises NotReached."""
    cluster = _cluster(monitor)
    for _ in range(_MOVES):
        state = await monitor.get_state()
        managers = cluster.named(MANAGER)
        if state is None or len(managers) != 1:
            raise NotReached(f"{len(managers)} managers, of which none answers")
        (manager,) = managers
        coordinator, wanted = cluster.host_of(state.coordinator.pid), cluster.host_of(manager)
        if wanted in ENGINE_HOSTS and coordinator == wanted:
            return
        if wanted in ENGINE_HOSTS:
            await asyncio.to_thread(cluster.end_coordinator)
            gone = state.coordinator.pid
        else:
            os.kill(manager, signal.SIGKILL)
            gone = manager
        assert gone is not None, "it is on no host"
        await monitor.until_whole({state.target}, _WHOLE_S, {gone})
    raise NotReached(f"the manager came to no other host in {_MOVES} attempts")


# ---------------------------------------------------------------- what the fault does


def _lose(hosts: Hosts, host: int, _rng: random.Random) -> str:
    hosts.lose(host)
    return "no power"


def _cut(hosts: Hosts, host: int, _rng: random.Random) -> str:
    hosts.cut(host)
    return "link down"


def _half_cut(hosts: Hosts, host: int, rng: random.Random) -> str:
    ways: tuple[Literal["from", "to"], ...] = ("from", "to")
    way = rng.choice(ways)
    hosts.drop(host, way)
    return f"packets {way} it vanish"


def _slow(hosts: Hosts, host: int, _rng: random.Random) -> str:
    hosts.slow(host)
    return "slow link"


def _host_fault(action: str, kind: str, any_host: Fault | None) -> Fault:
    pick, (lasts_s, begin, end) = _PICKS[kind], _ACTIONS[action]
    dies, reached = action == "kill", action == "slow"

    async def act(monitor: ClusterMonitor, state: ClusterState, rng: random.Random) -> FaultEffect:
        cluster = _cluster(monitor)
        hosts, host = cluster.hosts, pick(cluster, state, rng)
        if dies and host == HEAD and not hosts.keeps_gcs:
            raise NotReached("without Redis all of Ray ends with the host of its GCS")
        victims = cluster.pids_on(host, state) if dies else frozenset()
        what = await asyncio.to_thread(begin, hosts, host, rng)
        serving = sum(engine.state == "active" for engine in state.engines)
        return FaultEffect(
            f"host {host}: {what}",
            # A growth whose new engine is lost with its host is undone.
            frozenset({state.target, serving} if dies else {state.target}),
            victims,
            unreached=frozenset() if reached else frozenset({cluster.url_of(host)}),
            lasts_s=lasts_s,
            undo=partial(asyncio.to_thread, end, hosts, host),
        )

    return Fault(
        f"{action}-{kind}",
        act,
        cuts_connections=dies,
        hits_host=True,
        prepare=_move_control if kind == "control-host" else None,
        instead=any_host if kind == "control-host" else None,
    )


_PICKS: dict[str, Pick] = {
    "host": _without_control,
    "control-host": _with_control,
    "head": _head,
}
_ACTIONS: dict[str, tuple[float, Begin, End]] = {
    "kill": (_OFF_S, _lose, Hosts.boot),
    "cut": (_LASTS_S, _cut, Hosts.heal),
    "half-cut": (_LASTS_S, _half_cut, Hosts.heal),
    "slow": (_LASTS_S, _slow, Hosts.heal),
}


def _part(seconds: int, kind: str) -> Fault:
    """Returns a fault in which no packet passes between a host and the head, where Ray's GCS and
    Serve's controller run; clients reach both. No process may be terminated because of it."""

    async def act(monitor: ClusterMonitor, state: ClusterState, rng: random.Random) -> FaultEffect:
        cluster = _cluster(monitor)
        hosts, host = cluster.hosts, _PICKS[kind](cluster, state, rng)
        await asyncio.to_thread(hosts.part, HEAD, host)
        return FaultEffect(
            f"host {host}: parted from the head for {seconds} s",
            frozenset({state.target}),
            expects_no_restart=True,
            lasts_s=float(seconds),
            undo=partial(asyncio.to_thread, hosts.heal, host),
        )

    return Fault(
        f"part-{seconds}-{kind}", act, hits_host=True, prepare=_move_control, needs_patience=True
    )


def _host_faults() -> dict[str, Fault]:
    made: dict[str, Fault] = {}
    for kind in _PICKS:
        for action in _ACTIONS:
            made[f"{action}-{kind}"] = _host_fault(action, kind, made.get(f"{action}-host"))
    parts = [_part(seconds, kind) for kind in ("host", "control-host") for seconds in _PARTS_S]
    return made | {fault.name: fault for fault in parts}


HOST_FAULTS = _host_faults()
"""The faults by name, in the order of the table."""
