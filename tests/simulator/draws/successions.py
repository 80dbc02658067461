"""Long successions: versions that are given up one after the other, and managers that are lost one
after the other while they take over."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.simulator.draws.faults import draw_failed_calls, draw_time
from tests.simulator.draws.kinds import ENDS, FIRST_CALLS, MANAGERS, Mix
from tests.simulator.draws.moments import Moment
from tests.simulator.draws.operations import draw_operations
from tests.simulator.model import BROKEN_WEIGHTS
from tests.simulator.scenario import AtMessage, Fault, Operation

_RESTART_S = 1.0
"""The approximate time until a manager that was lost has a successor."""
_BOTH, _MANAGER = 0, 1
"""Targets of `kill-control`: manager and coordinator, or only the manager."""
_CHANGES = ("upgrade", "upgrade", "scale", "drain", "pause")
"""The changes that successors continue."""


def draw_succession(random: Random, mix: Mix, at: float) -> Moment:
    """Draws a succession that begins at about `at`. Engines that share experts are never
    upgraded."""
    if mix.expert or random.random() < 0.5:
        return _draw_managers(random, mix, at)
    return _draw_versions(random, mix, at)


def _draw_managers(random: Random, mix: Mix, at: float) -> Moment:
    """Draws changes, and the loss of a manager during or after them. Successors are lost at one of
    their first calls."""
    changes = replace(mix, changes=_CHANGES)
    operations = [
        operation
        for index in range(random.choice((1, 2)))
        for operation in draw_operations(random, changes, at + index * random.random())
    ]
    lost_at = at + random.choice((0.1, 0.5, 1.5, 4.0, 8.0)) * (0.5 + random.random())
    first = Fault(random.choice(mix.among(MANAGERS)), lost_at, random.randrange(12), 0.1)
    faults = [replace(first, time_s=draw_time(random))]
    kind = random.choice(mix.among(("kill-control",)))
    for index in range(random.choice((1, 1, 2, 3))):
        armed_at = lost_at + _RESTART_S * (index + random.uniform(0.1, 0.9))
        trigger = AtMessage(random.choice(FIRST_CALLS), random.choice((1, 1, 2)))
        target = random.choice((_MANAGER, _MANAGER, _BOTH))
        faults.append(Fault(kind, armed_at, target, draw_time(random), trigger))
    return Moment(faults, operations)


def _draw_versions(random: Random, mix: Mix, at: float) -> Moment:
    """Draws upgrades. Some of them fail or are cancelled, often when engines of the new version
    serve already. Meanwhile engines are lost, and calls through Ray fail."""
    operations: list[Operation] = []
    pause_s, weights = random.choice((0.5, 1.0, 2.0, 4.0)), 0
    requested_at = at
    for _ in range(random.choice((3, 4, 5, 6))):
        earlier, weights = weights, random.choice((1, 2, 2, BROKEN_WEIGHTS))
        if operations and random.random() < 0.4:
            weights = 0  # often cancels the previous one
        elif weights == earlier:
            weights = 1
        kind = random.choice(("upgrade", "upgrade", "update_weights", "redeploy"))
        operations.append(Operation(requested_at, kind, weights))
        requested_at += pause_s * (0.3 + 1.4 * random.random())
    faults = []
    for _ in range(random.choice((0, 1, 2, 3))):
        hit = Fault(
            random.choice(mix.among(ENDS)),
            random.uniform(at, requested_at + 2.0),
            random.randrange(12),
            draw_time(random),
            changing=random.random() < 0.4,
        )
        faults.append(hit)
    if "fail-call" in mix.possible and random.random() < 0.3:
        faults += draw_failed_calls(random, mix, random.uniform(at, requested_at))
    return Moment(faults, operations)
