"""The placement of experts on workers, and their transfer when the workers change.

All layers of a stage have the same placement. It is balanced to within one expert, and among the
balanced placements it moves the fewest experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from swell.configs.schema import Config, ModelConfig
from swell.worker.layers.moe import Expert, MoE
from swell.worker.loader import load_experts
from swell.worker.mesh import Mesh


def place_experts(have: Sequence[set[int]], num_experts: int) -> list[int]:
    """have: the experts that each rank holds (one may be held by several) -> the owner of each.

    With q, r = divmod(num_experts, ranks), r ranks own q + 1 experts and the others q. As many as
    possible stay with a rank that holds them. Every rank computes the same result.
    """
    placement = _Placement(have, num_experts)
    for expert in range(num_experts):
        placement.keep(expert)
    for expert in range(num_experts):
        if placement.owners[expert] is None:
            placement.give(expert)
    return [owner for owner in placement.owners if owner is not None]


class _Placement:
    """A bipartite matching of experts and ranks, grown by augmenting paths.

    Each rank may own `quota` experts; `extras` ranks may own one more, and a rank can take that
    right over from another.
    """

    def __init__(self, have: Sequence[set[int]], num_experts: int) -> None:
        self.have = have
        self.owners: list[int | None] = [None] * num_experts
        self.owned: list[set[int]] = [set() for _ in have]
        self.quota, self.extras = divmod(num_experts, len(have))

    def keep(self, expert: int) -> None:
        """Make a rank that holds the expert its owner, if other experts can move for it."""
        self._assign_to_holder(expert, set())

    def give(self, expert: int) -> None:
        """Make the rank with the fewest experts the owner."""
        rank = min(range(len(self.have)), key=lambda rank: len(self.owned[rank]))
        self._own(rank, expert)

    def _assign_to_holder(self, expert: int, visited: set[int]) -> bool:
        """Find an owner among the holders; ranks in `visited` have no room."""
        for rank, held in enumerate(self.have):
            if expert in held and rank not in visited and self._make_room(rank, visited):
                self._own(rank, expert)
                return True
        return False

    def _make_room(self, rank: int, visited: set[int]) -> bool:
        """Whether the rank may own one more: at once, or after another has moved."""
        visited.add(rank)
        load = len(self.owned[rank])
        if load < self.quota or (load == self.quota and self.extras > self._extras_taken()):
            return True
        if self._reassign_one(rank, visited):
            return True
        others = range(len(self.have)) if load == self.quota else ()
        return any(
            self._reassign_one(other, visited)
            for other in others
            if other not in visited and len(self.owned[other]) > self.quota
        )

    def _reassign_one(self, rank: int, visited: set[int]) -> bool:
        """Move one of the rank's experts to another of its holders."""
        visited.add(rank)
        return any(self._assign_to_holder(expert, visited) for expert in sorted(self.owned[rank]))

    def _own(self, rank: int, expert: int) -> None:
        before = self.owners[expert]
        if before is not None:
            self.owned[before].remove(expert)
        self.owners[expert] = rank
        self.owned[rank].add(expert)

    def _extras_taken(self) -> int:
        return sum(len(owned) > self.quota for owned in self.owned)


def max_share_bytes(layers: Sequence[MoE], config: Config) -> int:
    """Bytes of the most experts that one worker of a stage can own with at least
    `cluster.min_engines` engines."""
    ranks = config.cluster.min_engines * config.parallel.tensor
    return sum(-(-layer.traits.count // ranks) * layer.expert_bytes for layer in layers)


def rebalance(
    model: Any, mesh: Mesh, model_config: ModelConfig, on_progress: Callable[[], None]
) -> tuple[int, int]:
    """Bring the experts of this stage to where `place_experts` wants them; every worker of
    `mesh.expert` calls it at the same time.

    An expert that a peer has is received from the peer, one that no rank has is loaded from the
    checkpoint, and one that another rank owns is dropped. `on_progress` is called for each expert
    that has moved and each part that was read. Returns how many experts came to this
    rank (moved, loaded), each with all its layers. Raises `GroupError` if a peer fails,
    `ValueError` if the checkpoint cannot be read; in both cases each expert of this rank is either
    complete in all layers or absent from all.
    """
    layers = model.moe_layers()
    if not layers:
        return 0, 0
    group, here = mesh.expert, mesh.expert.rank
    count = layers[0].traits.count
    mine = torch.zeros(1, count, dtype=torch.int64, device=mesh.device)
    mine[0, list(layers[0].local_experts)] = 1
    have = [set(row.nonzero().flatten().tolist()) for row in group.all_gather(mine, 0).cpu()]
    moved, missing = 0, []
    for expert, owner in enumerate(place_experts(have, count)):
        holders = [rank for rank, held in enumerate(have) if expert in held]
        if not holders and owner == here:
            missing.append(expert)
        if holders and owner not in holders:
            moved += _move(layers, mesh, expert, holders[0], owner)
            on_progress()
        if owner != here:
            for layer in layers:
                layer.local_experts.pop(expert, None)
    _load(model, mesh, missing, model_config, on_progress)
    return moved, len(missing)


def _load(
    model: Any,
    mesh: Mesh,
    experts: Sequence[int],
    model_config: ModelConfig,
    on_progress: Callable[[], None],
) -> None:
    """Read experts from the checkpoint; after all moves, so that no peer waits for this rank's
    disk."""
    layers = model.moe_layers()
    made = {expert: [layer.make_expert() for layer in layers] for expert in experts}

    if made:
        shards = {
            expert: list(model.expert_weight_shards(expert, weights))
            for expert, weights in made.items()
        }
        load_experts(shards, mesh, model_config, lambda _done, _total: on_progress())
    for expert, weights in made.items():
        _store_expert(layers, expert, weights)


def _move(layers: Sequence[MoE], mesh: Mesh, expert: int, source: int, target: int) -> int:
    """Send or receive one expert. All ranks do the moves in the same order, so none deadlocks."""
    if mesh.expert.rank == source:
        for layer in layers:
            for tensor in layer.local_experts[expert]:
                mesh.expert.send(tensor, target).wait()
    if mesh.expert.rank != target:
        return 0
    weights = [layer.make_expert() for layer in layers]
    for arrived in weights:
        for tensor in arrived:
            mesh.expert.recv(tensor, source)
    _store_expert(layers, expert, weights)
    return 1


def _store_expert(layers: Sequence[MoE], expert: int, weights: Sequence[Expert]) -> None:
    for layer, part in zip(layers, weights, strict=True):
        layer.local_experts[expert] = part
