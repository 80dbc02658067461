"""Moves experts while engines serve, so that no rank has much more to compute than the others.

Engines that share experts compute each step together, so all workers of a stage reach a step at the
same time, and each has counted the same choices of all engines' tokens. Every so many steps each
decides by itself, and alike, whether its layers shall have another placement
(`expert_balance.py`), and they move the experts before that step. Nobody has to be asked, and
nothing is in flight.
"""

from __future__ import annotations

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
        self._group: Any = None
        self._steps = 0
        self._log = StructuredLogger("worker.experts", rank=mesh.rank)

    def before_step(self) -> None:
        """Every worker of the stage calls it before each step. Raises `GroupError` if a peer fails
        meanwhile."""
        if not self._layers:
            return
        if self._group is not self._mesh.expert:
            self._begin()
        self._steps += 1
        if self._steps % self._config.balance_steps == 0:
            self._balance()

    def _begin(self) -> None:
        self._group, self._steps = self._mesh.expert, 0
        for layer in self._layers:
            shape = (self._mesh.data.size, layer.traits.count)
            layer.load = torch.zeros(shape, dtype=torch.int64, device=self._mesh.device)

    def _balance(self) -> None:
        held, ranks = holdings(self._layers, self._mesh), self._mesh.expert.size
        moved, before, after = 0, 1.0, 1.0
        for layer, have in zip(self._layers, held, strict=True):
            assert layer.load is not None
            load = layer.load.tolist()
            layer.load //= 2  # what was chosen long ago counts less and less
            now = imbalance(_placement_of(layer, have, len(load)).rank_loads(load, ranks))
            placement = balance(load, have, layer.traits.count, self._config.redundant_experts)
            then = imbalance(placement.rank_loads(load, ranks))
            if now > _UNEVEN and then <= _GAIN * now:
                came = move_experts(layer, self._mesh, have, placement.holders, self._on_progress)
                layer.owners = placement.owners
                moved, now, before = moved + len(came), then, max(before, now)
            after = max(after, now)
        if before > 1.0:
            numbers = {"before": round(before, 3), "after": round(after, 3)}
            self._log.info("experts balanced", came=moved, **numbers)


def _placement_of(layer: MoE, have: list[set[int]], engines: int) -> ExpertPlacement:
    """The present one."""
    count = layer.traits.count
    holders = [tuple(rank for rank, held in enumerate(have) if e in held) for e in range(count)]
    owners = layer.owners or [[ranks[0] for ranks in holders]] * engines
    return ExpertPlacement(tuple(holders), tuple(map(tuple, owners)))
