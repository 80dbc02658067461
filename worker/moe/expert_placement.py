"""Computes which ranks hold copies of an expert, and which engines' tokens each copy serves, from
how often tokens chose the experts.

Ranks compute the experts for the tokens of all engines; a step waits for the rank with the most
work. So experts that are chosen often get redundant copies, and ranks share the load as evenly as
whole copies allow.

A copy computes the tokens of whole engines: where weights are not packed, as on CUDA, a matrix
product rounds differently when its number of rows changes, and an answer must not depend on the
placement. So an expert has at most as many copies as there are engines. These functions are pure
and give the same result on all ranks, which all use the same counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Load = Sequence[Sequence[int]]
"""[engines][experts]: how often tokens of an engine have chosen an expert."""
_SLACK = 0.02
"""Ranks whose loads differ by less than this fraction of the mean count as equal; among them, a
rank that already holds the expert is preferred."""


@dataclass(frozen=True)
class ExpertPlacement:
    """The placement of one layer's experts."""

    holders: tuple[tuple[int, ...], ...]
    """[experts] the ranks that hold each expert, ascending."""
    owners: tuple[tuple[int, ...], ...]
    """[engines][experts] the rank that computes the expert for the engine's tokens."""

    def rank_loads(self, load: Load, ranks: int) -> list[int]:
        """Returns the number of token choices that each rank computes."""
        loads = [0] * ranks
        for chosen, owners in zip(load, self.owners, strict=True):
            for count, owner in zip(chosen, owners, strict=True):
                loads[owner] += count
        return loads


def imbalance(rank_loads: Sequence[int]) -> float:
    """Returns the largest load divided by the mean: 1 is even. It tells how much longer a step
    takes than with even loads."""
    total = sum(rank_loads)
    return max(rank_loads) * len(rank_loads) / total if total else 1.0


def balance(
    load: Load, have: Sequence[set[int]], num_experts: int, redundant: int
) -> ExpertPlacement:
    """Returns a placement for this load. `have`: the experts that each rank holds; `redundant`: the
    total number of copies beyond the first of each expert. No rank holds more than its even share
    of all copies."""
    packing = _Packing(have, -(-(num_experts + redundant) // len(have)))
    copies = [
        (sum(load[engine][expert] for engine in engines), expert, engines)
        for expert, count in enumerate(_num_copies(load, num_experts, redundant, len(have)))
        for engines in _divide([chosen[expert] for chosen in load], count)
    ]
    owners = [[0] * num_experts for _ in load]
    for weight, expert, engines in sorted(copies, key=lambda copy: (-copy[0], copy[1], copy[2])):
        rank = packing.place(expert, weight)
        for engine in engines:
            owners[engine][expert] = rank
    holders = tuple(
        tuple(sorted({of_engine[expert] for of_engine in owners})) for expert in range(num_experts)
    )
    return ExpertPlacement(holders, tuple(map(tuple, owners)))


def _num_copies(load: Load, num_experts: int, redundant: int, ranks: int) -> list[int]:
    """Returns the number of copies of each expert: repeatedly adds one for the expert whose copies
    have the highest load."""
    totals = [sum(chosen[expert] for chosen in load) for expert in range(num_experts)]
    most, counts = min(len(load), ranks), [1] * num_experts
    for _ in range(redundant):
        more = [expert for expert in range(num_experts) if counts[expert] < most]
        if not more:
            break
        counts[max(more, key=lambda expert: (totals[expert] / counts[expert], -expert))] += 1
    return counts


def _divide(loads: list[int], parts: int) -> list[list[int]]:
    """Divides the engines into `parts` groups of about the same load."""
    found: list[list[int]] = [[] for _ in range(parts)]
    sums = [0] * parts
    for engine in sorted(range(len(loads)), key=lambda engine: (-loads[engine], engine)):
        part = min(range(parts), key=lambda part: (sums[part], len(found[part]), part))
        found[part].append(engine)
        sums[part] += loads[engine]
    return [sorted(part) for part in found]


class _Packing:
    """Assigns each copy to the rank with the lowest load that has room. The copies with the highest
    load come first."""

    def __init__(self, have: Sequence[set[int]], room: int) -> None:
        self._have, self._room = have, room
        self._held: list[set[int]] = [set() for _ in have]
        self._loads = [0] * len(have)

    def place(self, expert: int, weight: int) -> int:
        """Returns the rank for a copy: a rank without another copy of the expert, if one has
        room."""
        free = [rank for rank, held in enumerate(self._held) if len(held) < self._room]
        ranks = [rank for rank in free if expert not in self._held[rank]]
        if not ranks:
            ranks = [rank for rank, held in enumerate(self._held) if expert in held]
        mean = (sum(self._loads) + weight) / len(self._loads)
        limit = min(self._loads[rank] for rank in ranks) + _SLACK * mean
        alike = [rank for rank in ranks if self._loads[rank] <= limit]
        holding = [rank for rank in alike if expert in self._have[rank]]
        rank = min(
            holding or alike,
            key=lambda rank: (len(self._held[rank]) if not weight else 0, self._loads[rank], rank),
        )
        self._held[rank].add(expert)
        self._loads[rank] += weight
        return rank
