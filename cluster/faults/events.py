"""What can happen to a cluster: a process is killed, stopped or slowed, or its size changes.

An event says what it did and what must follow, so that whoever caused it can wait for that.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from swell.cluster.faults.watch import CONTROLLER, INGRESS, MANAGER, Missed, Watch
from swell.cluster.openai.admin import ClusterState

_SLOW_S = 1.0
"""Less than any sensible `cluster.stall_timeout_s`: nobody may be replaced for it."""


@dataclass(frozen=True)
class Deed:
    """What an event did, and what must follow."""

    text: str
    targets: frozenset[int]
    """Numbers of engines that may be wanted afterwards."""
    victim: int | None = None
    """A process that must be gone, and have a successor."""
    keeps: bool = False
    """No process may be replaced."""


@dataclass(frozen=True)
class Event:
    """One line of the table. `act` sees the cluster as it was just before."""

    name: str
    act: Callable[[Watch, ClusterState, random.Random], Awaitable[Deed]]
    rescales: bool = False
    """It asks for another size itself, so it cannot come while the size changes."""
    cuts: bool = False
    """Connections of the process end with it, and so do their answers."""
    forgets: bool = False
    """It may call off a change of size that is under way."""


# ---------------------------------------------------------------- whom

Victim = tuple[int, str]
"""A process and what it is."""
Finder = Callable[[Watch, ClusterState, random.Random], Victim]


def _engine(_watch: Watch, state: ClusterState, rng: random.Random) -> Victim:
    engine = rng.choice([e for e in state.engines if e.state == "active" and e.pid])
    assert engine.pid is not None
    return engine.pid, f"engine {engine.rank}"


def _worker(_watch: Watch, state: ClusterState, rng: random.Random) -> Victim:
    active = [engine for engine in state.engines if engine.state == "active"]
    pairs = [(engine, worker) for engine in active for worker in engine.workers]
    engine, worker = rng.choice(pairs)
    return worker.pid, f"worker {worker.rank} of engine {engine.rank}"


def _coordinator(_watch: Watch, state: ClusterState, _rng: random.Random) -> Victim:
    if state.coordinator.pid is None:
        raise Missed("/admin/cluster names no coordinator")
    return state.coordinator.pid, "coordinator"


def _titled(part: str, kind: str) -> Finder:
    def find(watch: Watch, _state: ClusterState, rng: random.Random) -> Victim:
        found = watch.cluster.named(part)
        if not found:
            raise Missed(f"no process of this cluster is called {part!r}")
        return rng.choice(sorted(found)), kind

    return find


# ---------------------------------------------------------------- what


async def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


async def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


async def _slow(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(_SLOW_S)
    os.kill(pid, signal.SIGCONT)


def _signal(action: str, kind: str, *, cuts: bool = False, forgets: bool = False) -> Event:
    """`action` on a process of `kind`. Whoever is only slow loses nothing and forgets nothing."""
    send, find = _ACTIONS[action], _KINDS[kind]
    keeps = action == "slow"

    async def act(watch: Watch, state: ClusterState, rng: random.Random) -> Deed:
        pid, who = find(watch, state, rng)
        await send(pid)
        targets = frozenset({state.target})
        text = f"{action} {who} (pid {pid})"
        return Deed(text, targets, keeps=True) if keeps else Deed(text, targets, victim=pid)

    return Event(f"{action}-{kind}", act, cuts=cuts and not keeps, forgets=forgets and not keeps)


def scale(name: str, size: Callable[[int], int]) -> Event:
    """A change of size; those that leave hand over at once what they have."""

    async def act(watch: Watch, state: ClusterState, _rng: random.Random) -> Deed:
        engines = max(1, size(state.target))
        await watch.ask("/admin/scale", {"engines": engines, "drain_timeout_s": 0})
        return Deed(f"scale {state.target} to {engines}", frozenset({engines}))

    return Event(name, act, rescales=True)


async def _drain(watch: Watch, state: ClusterState, rng: random.Random) -> Deed:
    rank = rng.choice([engine.rank for engine in state.engines])
    await watch.ask("/admin/drain", {"rank": rank})
    return Deed(f"drain engine {rank}", frozenset({state.target - 1}))


async def _nothing(_watch: Watch, state: ClusterState, _rng: random.Random) -> Deed:
    return Deed("nothing", frozenset({state.target}), keeps=True)


_KINDS: dict[str, Finder] = {
    "engine": _engine,
    "worker": _worker,
    "coordinator": _coordinator,
    "ingress": _titled(INGRESS, "ingress"),
    "manager": _titled(MANAGER, "manager"),
    "controller": _titled(CONTROLLER, "controller of Ray Serve"),
}
_ACTIONS: dict[str, Callable[[int], Awaitable[None]]] = {
    "kill": _kill,
    "stop": _stop,
    "slow": _slow,
}

_TABLE = (
    Event("nothing", _nothing),
    *(
        _signal(action, kind)
        for kind in ("engine", "worker", "coordinator")
        for action in ("kill", "stop", "slow")
    ),
    *(_signal(action, "ingress", cuts=True) for action in ("kill", "stop", "slow")),
    *(_signal(action, "manager", forgets=True) for action in ("kill", "stop", "slow")),
    # Ray restarts a controller that died; a stopped one is a fault of Ray's own.
    _signal("kill", "controller"),
    scale("scale-up", lambda engines: engines + 1),
    scale("scale-down", lambda engines: engines - 1),
    Event("drain", _drain, rescales=True),
)

EVENTS: dict[str, Event] = {event.name: event for event in _TABLE}
"""By name, in the order of the matrix."""


def named(name: str) -> Event:
    """Raises ValueError with the known names."""
    if name not in EVENTS:
        raise ValueError(f"no event {name!r}; the events are: {', '.join(EVENTS)}")
    return EVENTS[name]
