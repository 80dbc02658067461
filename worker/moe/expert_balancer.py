"""Moves experts between ranks during serving, so that no rank computes much more than the others.

Engines that share experts compute each step together, so all workers of a stage reach a step at the
same time. Every `balance_steps` steps they exchange which experts their tokens have chosen, and
each worker decides whether its layers need another placement (`expert_placement.py`): all decide
alike, since all have the same numbers. Before each of the next steps they move the experts of one
layer. No command is needed, and no move is in flight between steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from swell.configs.runtime.log import StructuredLogger
from swell.configs.schema import ParallelConfig
from swell.worker.comm.mesh import Mesh
from swell.worker.layers.moe import MoE
from swell.worker.model_interfaces import MixtureOfExperts
from swell.worker.moe.expert_placement import ExpertPlacement, balance, imbalance
from swell.worker.moe.experts import holdings, move_experts

_UNEVEN = 1.1
"""The imbalance of a layer above which its experts are moved."""
_GAIN = 0.95
"""The most of its imbalance that may remain after a move for it to be worthwhile, as a fraction."""


class ExpertBalancer:
    """The balancer of one worker. When a group is formed again, its steps are counted from zero."""

    def __init__(
        self,
        model: MixtureOfExperts,
        mesh: Mesh,
        config: ParallelConfig,
        on_progress: Callable[[], None],
    ) -> None:
        self._layers: list[MoE] = model.moe_layers() if config.balance_steps else []
        for layer in self._layers:
            layer.count_load()
        self._mesh, self._config, self._on_progress = mesh, config, on_progress
        self._formed: Any = None
        """The group whose steps are counted, and its generation."""
        self._steps = 0
        self._moves: deque[tuple[MoE, list[set[int]], ExpertPlacement]] = deque()
        """Layers that need another placement, and the experts that each rank holds there now."""
        self._log = StructuredLogger("worker.experts", rank=mesh.rank)

    @property
    def is_moving(self) -> bool:
        """Whether the next `before_step` moves experts."""
        return bool(self._moves)

    def before_step(self) -> float:
        """Moves the experts of one layer or checks the loads, if due. Every worker of the stage
        calls this before each step. Returns the largest imbalance of a layer if loads were checked
        before this step, otherwise 0. Raises `GroupError` if a peer fails meanwhile."""
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
            layer.count_load()

    def _look(self) -> float:
        """Decides which layers need another placement, and returns the largest imbalance."""
        ranks, before, after = self._mesh.expert.size, [1.0], [1.0]
        held = holdings(self._layers, self._mesh)
        if not any(have for of_layer in held for have in of_layer):
            return 0.0  # a profile run: experts are placed afterwards
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
        """Returns [layers][engines][experts]: how often tokens have chosen each expert, as the
        first rank of each engine has counted: another rank may round a logit differently. The
        counts are halved after each exchange, so that older choices count less."""
        loads = torch.stack([layer.load for layer in self._layers if layer.load is not None])
        gathered = self._mesh.expert.all_gather(loads.unsqueeze(0), 0)
        for layer in self._layers:
            layer.halve_load()
        of_engines = gathered[:: self._mesh.tensor.size].transpose(0, 1)
        found: list[list[list[int]]] = of_engines.tolist()
        return found


def _placement_of(layer: MoE, have: list[set[int]], engines: int) -> ExpertPlacement:
    """Returns the layer's current placement."""
    count = layer.traits.count
    holders = [tuple(rank for rank, held in enumerate(have) if e in held) for e in range(count)]
    owners = layer.owners or [[ranks[0] for ranks in holders]] * engines
    return ExpertPlacement(tuple(holders), tuple(map(tuple, owners)))
