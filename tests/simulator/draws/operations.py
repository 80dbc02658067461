"""Changes by an operator: one, its reversal, or several in quick succession."""

from __future__ import annotations

from random import Random

from tests.simulator.draws.kinds import Mix
from tests.simulator.model import BROKEN_WEIGHTS
from tests.simulator.scenario import Operation

_MANY = 4
"""From this number on, upgrades of one moment come in quick succession, to weights that load."""


def draw_operations(random: Random, mix: Mix, at: float) -> list[Operation]:
    """Draws one change, often with its reversal or another change during it."""
    later_s = random.choice((0.05, 0.5, 2.0, 5.0)) * (0.5 + random.random())
    match random.choice(mix.changes):
        case "scale":
            numbers = [random.randint(1, 4) for _ in range(random.randint(1, 3))]
            return [Operation(at + i * later_s, "scale", n) for i, n in enumerate(numbers)]
        case "drain":
            return [Operation(at, "drain", random.randint(0, 2))]
        case "pause":
            level = random.randint(0, 2)
            return [Operation(at, "pause", level), Operation(at + 2 * later_s, "resume")]
    if mix.expert:  # they are never upgraded
        numbers = [random.randint(1, 4), random.randint(1, 4)]
        return [Operation(at + i * later_s, "scale", n) for i, n in enumerate(numbers)]
    return _draw_versions(random, at, later_s)


def _draw_versions(random: Random, at: float, later_s: float) -> list[Operation]:
    """Draws upgrades. Some requests come before the previous one is carried out, and a few follow
    each other so often that there are more versions than a manager remembers."""
    operations = []
    number = random.choice((1, 1, 2, 3, 6))
    for _ in range(number):
        kind = random.choice(("upgrade", "update_weights", "update_weights", "redeploy"))
        weights = random.choice((0, 1, 1, 2, 2, BROKEN_WEIGHTS if number < _MANY else 1))
        operations.append(Operation(at, kind, weights))
        at += later_s if number < _MANY else min(later_s, 1.5) * (0.5 + random.random())
    return operations
