"""Faults of a cluster: a process is killed, stopped or slowed, several are killed at the same
instant, or the size changes.

A fault returns what it did and what must follow, so that its caller can wait for that.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from swell.cluster.api.admin.protocol import ClusterState
from tests.faults.cluster_monitor import (
    CONTROLLER,
    INGRESS,
    MANAGER,
    STORE,
    ClusterMonitor,
    NotReached,
)

_SLOW_S = 1.0
"""Shorter than any sensible `cluster.stall_timeout_s`: no process may be replaced because of it."""

Prepare = Callable[[ClusterMonitor], Awaitable[None]]


@dataclass(frozen=True)
class FaultEffect:
    """The effect of a fault, and what must follow."""

    text: str
    targets: frozenset[int]
    """The numbers of engines that are valid afterwards."""
    victims: frozenset[int] = frozenset()
    """Processes that must be gone and have successors."""
    ranks: frozenset[int] = frozenset()
    """The engines whose processes were hit."""
    expects_no_restart: bool = False
    """Whether no process may be replaced."""
    unreached: frozenset[str] = frozenset()
    """The addresses of ingresses that no client can reach during the fault."""
    lasts_s: float = 0.0
    undo: Callable[[], Awaitable[None]] | None = None
    """Ends the fault after `lasts_s`."""


@dataclass(frozen=True)
class Fault:
    """One line of the table. `act` gets the state of the cluster just before the fault."""

    name: str
    act: Callable[[ClusterMonitor, ClusterState, random.Random], Coroutine[Any, Any, FaultEffect]]
    adds: int = 0
    """The change in the number of engines. A fault that changes it cannot occur while the size
    changes."""
    cuts_connections: bool = False
    """Whether the connections of the process, and their answers, end with it."""
    hits_host: bool = False
    prepare: Prepare | None = None
    """Brings the cluster to a state in which the fault finds its victim."""
    needs_patience: bool = False
    """Whether the fault needs a set-up whose Ray considers a host lost only after more than twice
    the fault's duration."""
    instead: Fault | None = None
    """The fault that a storm causes instead, if this one finds no victim."""


# ---------------------------------------------------------------- victims

Victim = tuple[int, str]
"""A process id and a description."""
Finder = Callable[[ClusterMonitor, ClusterState, random.Random], list[Victim]]


def _engines(_monitor: ClusterMonitor, state: ClusterState, _rng: random.Random) -> list[Victim]:
    active = [engine for engine in state.engines if engine.state == "active"]
    return [(engine.pid, f"engine {engine.rank}") for engine in active if engine.pid is not None]


def _engine(monitor: ClusterMonitor, state: ClusterState, rng: random.Random) -> list[Victim]:
    return [rng.choice(_engines(monitor, state, rng))]


def _worker(_monitor: ClusterMonitor, state: ClusterState, rng: random.Random) -> list[Victim]:
    active = [engine for engine in state.engines if engine.state == "active"]
    victims = [
        (worker.pid, f"worker {worker.rank} of engine {engine.rank}")
        for engine in active
        for worker in engine.workers
        if worker.pid is not None
    ]
    if not victims:
        raise NotReached("no worker of an active engine has a process")
    return [rng.choice(victims)]


def _coordinator(
    _monitor: ClusterMonitor, state: ClusterState, _rng: random.Random
) -> list[Victim]:
    if state.coordinator.pid is None:
        raise NotReached("/admin/cluster names no coordinator")
    return [(state.coordinator.pid, "coordinator")]


def _titled(part: str, kind: str) -> Finder:
    def find(monitor: ClusterMonitor, _state: ClusterState, rng: random.Random) -> list[Victim]:
        found = monitor.cluster.named(part)
        if not found:
            raise NotReached(f"no process of this cluster is called {part!r}")
        return [(rng.choice(sorted(found)), kind)]

    return find


# ---------------------------------------------------------------- actions


async def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


async def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


async def _slow(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(_SLOW_S)
    os.kill(pid, signal.SIGCONT)


def _signal(action: str, *kinds: str) -> Fault:
    """Returns a fault that applies `action` to a process of each kind; all are found before the
    first signal. A process that is only slow must not be replaced."""
    send, finders = _ACTIONS[action], [_KINDS[kind] for kind in kinds]
    expects_no_restart = action == "slow"

    async def act(monitor: ClusterMonitor, state: ClusterState, rng: random.Random) -> FaultEffect:
        found = [victim for find in finders for victim in find(monitor, state, rng)]
        for pid, _name in found:
            await send(pid)
        victims = frozenset() if expects_no_restart else frozenset(pid for pid, _name in found)
        text = f"{action} " + " and ".join(f"{name} (pid {pid})" for pid, name in found)
        ranks = frozenset(e.rank for e in state.engines if e.pid in {pid for pid, _name in found})
        return FaultEffect(text, frozenset({state.target}), victims, ranks, expects_no_restart)

    return Fault(
        f"{action}-{'+'.join(kinds)}",
        act,
        cuts_connections="ingress" in kinds and not expects_no_restart,
    )


def scale(name: str, adds: int) -> Fault:
    """Returns a fault that changes the size; leaving engines hand over their requests at once."""

    async def act(monitor: ClusterMonitor, state: ClusterState, _rng: random.Random) -> FaultEffect:
        engines = max(1, state.target + adds)
        await monitor.post("/admin/scale", {"engines": engines, "drain_timeout_s": 0})
        return FaultEffect(f"scale {state.target} to {engines}", frozenset({engines}))

    return Fault(name, act, adds=adds)


async def _drain(monitor: ClusterMonitor, state: ClusterState, rng: random.Random) -> FaultEffect:
    rank = rng.choice([engine.rank for engine in state.engines])
    await monitor.post("/admin/drain", {"rank": rank})
    return FaultEffect(f"drain engine {rank}", frozenset({state.target - 1}))


async def _nothing(
    _monitor: ClusterMonitor, state: ClusterState, _rng: random.Random
) -> FaultEffect:
    return FaultEffect("nothing", frozenset({state.target}), expects_no_restart=True)


_KINDS: dict[str, Finder] = {
    "engine": _engine,
    "engines": _engines,
    "worker": _worker,
    "coordinator": _coordinator,
    "ingress": _titled(INGRESS, "ingress"),
    "manager": _titled(MANAGER, "manager"),
    "store": _titled(STORE, "store of responses and sessions"),
    "controller": _titled(CONTROLLER, "controller of Ray Serve"),
}
_ACTIONS: dict[str, Callable[[int], Awaitable[None]]] = {
    "kill": _kill,
    "stop": _stop,
    "slow": _slow,
}

_ALONE = ("engine", "worker", "coordinator", "ingress", "manager", "store")
_TOGETHER = (
    ("engine", "manager"),
    ("engines", "manager"),
    ("manager", "coordinator"),
    ("engine", "manager", "coordinator"),
    ("engines", "manager", "coordinator"),
    ("engines", "manager", "coordinator", "controller"),
    ("engines", "manager", "coordinator", "controller", "ingress"),
)
"""Processes that are killed at the same instant, as when a machine runs out of memory."""

_TABLE = (
    Fault("nothing", _nothing),
    *(_signal(action, kind) for kind in _ALONE for action in ("kill", "stop", "slow")),
    # Ray restarts a controller that died; a stopped one is a fault of Ray itself.
    _signal("kill", "controller"),
    *(_signal("kill", *kinds) for kinds in _TOGETHER),
    scale("scale-up", 1),
    scale("scale-down", -1),
    Fault("drain", _drain, adds=-1),
)

FAULTS: dict[str, Fault] = {fault.name: fault for fault in _TABLE}
"""The faults by name, in the order of the matrix."""


def named(name: str) -> Fault:
    """Returns the fault with this name; raises ValueError with the known names."""
    return find(name, FAULTS)


def find(name: str, known: Mapping[str, Fault]) -> Fault:
    """Returns the fault with this name; raises ValueError with the known names."""
    if name not in known:
        raise ValueError(f"no fault {name!r}; the faults are: {', '.join(known)}")
    return known[name]
