"""Decides what engines do on hosts that will be taken away. Pure.

    notice --- move ---> its replacement starts elsewhere, it serves on --- leave ---> gone
                                     |                                       ^
                                     +-- the replacement serves, or ---------+
                                         only the drain time is left

The notice of a host is short for spot capacity (half a minute to two minutes), and longer than a
drain if an operator or Ray's autoscaler drains the node. An engine that left at once would not
serve during the notice, and if it is the only engine, the cluster would not serve at all. If a
notice is withdrawn (Ray forgets it when its GCS restarts) the engines stay, unless their
replacements already serve.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swell.cluster.control.plan.fleet_view import EngineStatus, FleetView, Intent, Place

HANDOVER_S = 5.0
"""Time before the host goes, to hand over the requests that an engine still has at its deadline."""


@dataclass(frozen=True)
class Moves:
    """The next steps, by rank."""

    move: tuple[int, ...] = ()
    leave: Mapping[int, float] = field(default_factory=dict)
    """Drain time of each leaving engine, in seconds."""
    stay: tuple[int, ...] = ()
    """Engines whose host stays and whose replacement does not serve yet."""


def plan_moves(
    fleet: FleetView, target: int, draining: Mapping[str, float], drain_timeout_s: float
) -> Moves:
    """Decides the next steps. `target`: the target number of engines; `draining`: seconds until
    nodes are taken away, by node id."""
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
    """Returns the drain time, if the engine must leave now; None: there is more time. If no other
    engine can accept new requests, it serves until the host goes."""
    assert engine.node is not None
    left_s = draining[engine.node] - HANDOVER_S
    if left_s > (drain_timeout_s if has_others else 0.0):
        return None
    return max(0.0, left_s)
