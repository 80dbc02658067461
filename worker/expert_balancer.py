"""Moves experts while engines serve, so that no rank has much more to compute than the others.

Engines that share experts compute each step together, so all workers of a stage reach a step at the
same time. Every so many steps they exchange what their tokens have chosen, and each decides by
itself whether its layers shall have another placement (`expert_balance.py`): all alike, since all
have the same numbers. They move the experts of one layer before each of the next steps. No command
is needed, and nothing is in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from swell.configs.log import StructuredLogger
from swell.configs.schema import ParallelConfig
from swell.worker.expert_balance import ExpertPlacement, balance, imbalance
from swell.worker.experts import holdings, move_experts
from swell.worker.layers.moe import MoE
from swell.worker.mesh import Mesh

_UNEVEN = 1.1
"""The imbalance of a layer above which its experts are moved."""
_GAIN = 0.95
"""Part of its imbalance that must be left at most."""


class ExpertBalancer:
    """Of one worker; the steps of a group that is formed anew are counted from the beginning."""

    def __init__(
        self, model: Any, mesh: Mesh, config: ParallelConfig, on_progress: Callable[[], None]
    ) -> None:
        self._layers: list[MoE] = model.moe_layers() if config.balance_steps else []
        self._mesh, self._config, self._on_progress = mesh, config, on_progress
        self._formed: Any = None
        """The group whose steps are counted, and which forming of it."""
        self._steps = 0
        self._moves: deque[tuple[MoE, list[set[int]], ExpertPlacement]] = deque()
        """Layers that shall have another placement, and what each rank holds there."""
        self._log = StructuredLogger("worker.experts", rank=mesh.rank)

    def before_step(self) -> float:
        """Every worker of the stage calls it before each step. Returns the largest imbalance of a
        layer, in a step before which they looked, else 0. Raises `GroupError` if a peer fails
        meanwhile."""
        if not self._layers:
            return 0.0
        if self._formed != (formed := (self._mesh.expert, self._mesh.generation)):
            self._formed = formed
            self._begin()
        self._steps += 1
        if self._moves:
            layer, have, placement = self._moves.popleft()
            move_experts(layer, self._mesh, have, placement.holders, self._on_progress)
            layer.share(placement.owners)
        elif self._steps >= self._config.balance_steps:
            self._steps = 0
            return self._look()
        return 0.0

    def _begin(self) -> None:
        self._steps = 0
        self._moves.clear()
        for layer in self._layers:
            layer.load = torch.zeros(
                layer.traits.count, dtype=torch.int64, device=self._mesh.device
            )

    def _look(self) -> float:
        """Decide which layers shall have another placement."""
        ranks, before, after = self._mesh.expert.size, [1.0], [1.0]
        held = holdings(self._layers, self._mesh)
        for layer, have, load in zip(self._layers, held, self._exchange_loads(), strict=True):
            now = then = imbalance(_placement_of(layer, have, len(load)).rank_loads(load, ranks))
            if now > _UNEVEN:
                redundant = self._config.redundant_experts
                placement = balance(load, have, layer.traits.count, redundant)
                then = imbalance(placement.rank_loads(load, ranks))
                if then <= _GAIN * now:
                    self._moves.append((layer, have, placement))
            before.append(now)
            after.append(then)
        if self._moves:
            numbers = {"before": round(max(before), 3), "after": round(max(after), 3)}
            self._log.info("experts move", layers=len(self._moves), **numbers)
        return max(before)

    def _exchange_loads(self) -> list[list[list[int]]]:
        """[layers][engines][experts] what tokens have chosen, as the first rank of each engine has
        counted: another one may round a logit differently. What was chosen long ago counts less and
        less."""
        loads = torch.stack([layer.load for layer in self._layers if layer.load is not None])
        gathered = self._mesh.expert.all_gather(loads.unsqueeze(0), 0)
        for layer in self._layers:
            assert layer.load is not None
            layer.load //= 2
        of_engines = gathered[:: self._mesh.tensor.size].transpose(0, 1)
        found: list[list[list[int]]] = of_engines.tolist()
        return found


def _placement_of(layer: MoE, have: list[set[int]], engines: int) -> ExpertPlacement:
    """The present one."""
    count = layer.traits.count
    holders = [tuple(rank for rank, held in enumerate(have) if e in held) for e in range(count)]
    owners = layer.owners or [[ranks[0] for ranks in holders]] * engines
    return ExpertPlacement(tuple(holders), tuple(map(tuple, owners)))
