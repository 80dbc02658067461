"""Which ranks hold copies of an expert, and whose tokens each copy computes, by what was chosen.

Ranks compute the experts of all engines' tokens; a step waits for the rank with the most. So
experts that are chosen often get further copies, and ranks share the load as evenly as whole
copies allow.
A copy computes the tokens of whole engines: where weights are not packed, as on CUDA, a product
whose number of rows changes is rounded differently, and an answer must not depend on the
placement. So an expert has at most as many copies as there are engines. Pure, and equal on all
ranks, which all count the same choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Load = Sequence[Sequence[int]]
"""[engines][experts]: how often tokens of an engine have chosen an expert."""
_SLACK = 0.02
"""Ranks whose loads differ by less than this part of the mean are alike: that one which holds the
expert already takes it."""


@dataclass(frozen=True)
class ExpertPlacement:
    """Of one layer."""

    holders: tuple[tuple[int, ...], ...]
    """[experts] the ranks that hold each expert, ascending."""
    owners: tuple[tuple[int, ...], ...]
    """[engines][experts] the rank that computes the expert for tokens of the engine."""

    def rank_loads(self, load: Load, ranks: int) -> list[int]:
        """Choices that each rank computes."""
        loads = [0] * ranks
        for chosen, owners in zip(load, self.owners, strict=True):
            for count, owner in zip(chosen, owners, strict=True):
                loads[owner] += count
        return loads


def imbalance(rank_loads: Sequence[int]) -> float:
    """The largest load over the mean: 1 is even; how much longer a step takes than it had to."""
    total = sum(rank_loads)
    return max(rank_loads) * len(rank_loads) / total if total else 1.0


def balance(
    load: Load, have: Sequence[set[int]], num_experts: int, redundant: int
) -> ExpertPlacement:
    """A placement for this load. `have`: the experts that each rank holds; `redundant`: copies of
    all experts together beyond the first. No rank holds more than its even share of all copies."""
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
    """One more, again and again, for the expert whose copies have the most to compute."""
    totals = [sum(chosen[expert] for chosen in load) for expert in range(num_experts)]
    most, counts = min(len(load), ranks), [1] * num_experts
    for _ in range(redundant):
        more = [expert for expert in range(num_experts) if counts[expert] < most]
        if not more:
            break
        counts[max(more, key=lambda expert: (totals[expert] / counts[expert], -expert))] += 1
    return counts


def _divide(loads: list[int], parts: int) -> list[list[int]]:
    """Engines in so many parts of about the same load."""
    found: list[list[int]] = [[] for _ in range(parts)]
    sums = [0] * parts
    for engine in sorted(range(len(loads)), key=lambda engine: (-loads[engine], engine)):
        part = min(range(parts), key=lambda part: (sums[part], len(found[part]), part))
        found[part].append(engine)
        sums[part] += loads[engine]
    return [sorted(part) for part in found]


class _Packing:
    """Copies go to the rank with the least load that has room, the largest copies first."""

    def __init__(self, have: Sequence[set[int]], room: int) -> None:
        self._have, self._room = have, room
        self._held: list[set[int]] = [set() for _ in have]
        self._loads = [0] * len(have)

    def place(self, expert: int, weight: int) -> int:
        """The rank of a copy: one without another copy of the expert, if such a one has room."""
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
