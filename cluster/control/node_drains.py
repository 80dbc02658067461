"""Engines on hosts that are taken away: what to do with each, pure.

    notice --- move ---> its replacement starts elsewhere, it serves on --- leave ---> gone
                                     |                                       ^
                                     +-- the replacement serves, or ---------+
                                         only the time to finish is left

A host's notice is short where it is spot capacity (half a minute to two), and longer than a drain
where an operator or Ray's autoscaler drains it. An engine that left at once would take away what it
could serve until then, and all if it is the only one. Where a notice is withdrawn (Ray forgets it
when its GCS is started again) the engines stay, unless others serve in their place by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swell.cluster.control.fleet_view import EngineStatus, FleetView, Intent, Place

HANDOVER_S = 5.0
"""Before the host goes: for what an engine has left when its time to finish is over."""


@dataclass(frozen=True)
class Moves:
    """What to do now, by rank."""

    move: tuple[int, ...] = ()
    leave: Mapping[int, float] = field(default_factory=dict)
    """How long each may finish its requests, in seconds."""
    stay: tuple[int, ...] = ()
    """Their host stays, and nothing serves in their place yet."""


def plan_moves(
    fleet: FleetView, target: int, draining: Mapping[str, float], drain_timeout_s: float
) -> Moves:
    """`target`: engines that are wanted; `draining`: seconds until nodes are taken away."""
    here = [e for e in fleet.engines if e.place is Place.SERVING and e.node in draining]
    move = tuple(e.rank for e in here if e.intent in (Intent.STAY, Intent.RELOAD))
    others = [rank for rank in fleet.staying if rank not in move]
    leave = {}
    for engine in here:
        time_s = _time_to_finish(engine, draining, drain_timeout_s, has_others=bool(others))
        if engine.intent is Intent.MOVE and (time_s is not None or len(others) >= target):
            leave[engine.rank] = drain_timeout_s if time_s is None else time_s
    moving = [e for e in fleet.engines if e.place is Place.SERVING and e.intent is Intent.MOVE]
    withdrawn = [engine.rank for engine in moving if engine.node not in draining]
    stay = withdrawn[: max(0, target - len(others))]
    leave |= dict.fromkeys(withdrawn[len(stay) :], drain_timeout_s)
    return Moves(move, leave, tuple(stay))


def _time_to_finish(
    engine: EngineStatus,
    draining: Mapping[str, float],
    drain_timeout_s: float,
    *,
    has_others: bool,
) -> float | None:
    """None: there is more time than that. Without others to take new requests, it does until the
    end."""
    assert engine.node is not None
    left_s = draining[engine.node] - HANDOVER_S
    if left_s > (drain_timeout_s if has_others else 0.0):
        return None
    return max(0.0, left_s)
