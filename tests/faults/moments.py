"""Moments of a fault: each brings the cluster to a state, and returns while the state lasts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.faults.cluster_monitor import AlreadyPassed, ClusterMonitor, NotReached
from tests.faults.load import DECODE, PREFILL, Load, Shape
from tests.support.deadlines import HANG_S

_POLL_S = 0.01
_BUSY_SHARE = 0.75
"""The share of the streams that counts as all of them."""


@dataclass(frozen=True)
class Moment:
    """One column of the matrix. `reach` raises NotReached if the moment does not occur,
    AlreadyPassed if it is over too soon."""

    name: str
    reach: Callable[[ClusterMonitor, Load], Awaitable[None]]
    shape: Shape = DECODE
    grows: bool = False
    """Whether an engine is being added at this moment."""
    waves: bool = False
    """Whether only engines that share experts have this moment."""


async def until_streaming(load: Load, share: float) -> None:
    """Waits until this share of the streams has a request whose answer has begun. Raises
    NotReached."""
    await _until(lambda: load.streaming >= share * load.streams, "streams in flight")


async def _until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + HANG_S
    while not true():
        if time.monotonic() > deadline:
            raise NotReached(f"{what}: not within {HANG_S:g} s")
        await asyncio.sleep(_POLL_S)


async def _idle(_monitor: ClusterMonitor, _load: Load) -> None:
    """No request is in flight; the load begins after the fault."""


async def _prefill(_monitor: ClusterMonitor, load: Load) -> None:
    """Most requests in flight are still without tokens: their long prompts are being computed."""
    load.start()
    await _until(lambda: len(load.answers) > 0, "a first answer")
    await _until(lambda: 2 * load.streaming < len(load.open), "prompts in work")


async def _decode(_monitor: ClusterMonitor, load: Load) -> None:
    """Most requests in flight are streaming."""
    load.start()
    await until_streaming(load, _BUSY_SHARE * _BUSY_SHARE)


def _rescale(phase: str) -> Callable[[ClusterMonitor, Load], Awaitable[None]]:
    async def reach(monitor: ClusterMonitor, load: Load) -> None:
        await _decode(monitor, load)
        wanted = (await monitor.wait_for_state(HANG_S)).target + 1
        await monitor.post("/admin/scale", {"engines": wanted})
        deadline = time.monotonic() + HANG_S
        begun = False
        while time.monotonic() < deadline:
            state = await monitor.get_state()
            if state is not None and state.rescale.phase == phase:
                return
            if begun and state is not None and state.rescale.phase == "idle":
                break
            begun = begun or (state is not None and state.rescale.phase != "idle")
        raise AlreadyPassed(f"phase {phase!r} was not seen")

    return reach


async def _wave_start(monitor: ClusterMonitor, load: Load) -> None:
    """The first steps of a wave, started by idle engines."""
    steps = await _steps(monitor)
    load.start()
    deadline = time.monotonic() + HANG_S
    while await _steps(monitor) == steps:
        if time.monotonic() > deadline:
            raise NotReached("no engine began to step")


async def _wave_end(_monitor: ClusterMonitor, load: Load) -> None:
    """Each stream has one answer, and the last has just finished: the engines stop."""
    load.start(rounds=1)
    await load.ended()


async def _steps(monitor: ClusterMonitor) -> int:
    state = await monitor.get_state()
    return sum(engine.steps for engine in state.engines) if state is not None else 0


_TABLE = (
    Moment("idle", _idle),
    Moment("prefill", _prefill, shape=PREFILL),
    Moment("decode", _decode),
    Moment("rescale-prepare", _rescale("prepare"), grows=True),
    Moment("rescale-commit", _rescale("commit"), grows=True),
    Moment("wave-start", _wave_start, waves=True),
    Moment("wave-end", _wave_end, shape=PREFILL, waves=True),
)

MOMENTS: dict[str, Moment] = {moment.name: moment for moment in _TABLE}
"""The moments by name, in the order of the matrix."""


def named(name: str) -> Moment:
    """Returns the moment with this name; raises ValueError with the known names."""
    if name not in MOMENTS:
        raise ValueError(f"no moment {name!r}; the moments are: {', '.join(MOMENTS)}")
    return MOMENTS[name]
