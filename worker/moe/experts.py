"""The placement of experts on workers, and their transfer when the workers change.

Each layer has its own placement. It is balanced to within one expert, and among the balanced
placements it moves the fewest experts. `expert_balancer.py` may change it during serving.

The processors of ranks may pack weights in different orders, so a weight is sent in the order of a
checkpoint: as floats, or as integers, scales and minima. If experts may be quantized, the form of
each weight is sent first, because the matrices of one checkpoint may have different forms.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from swell.configs.schema import Config, ModelConfig
from swell.kernels.linear import PackedTensor, Weight
from swell.kernels.weights.quantized import (
    Numbers,
    PackedQuantizedTensor,
    QuantizedForm,
    QuantizedTensor,
)
from swell.worker.comm.mesh import Group, Mesh
from swell.worker.layers.moe import Expert, ExpertWeight, MoE
from swell.worker.layers.packed_weight import NamedMatrix
from swell.worker.loader import load_experts
from swell.worker.model_interfaces import MixtureOfExperts, Model
from swell.worker.quantization.loaded_matrices import matrices_to_load

_DESCRIBED = 5
"""The numbers that describe the form of a weight."""


def place_experts(have: Sequence[set[int]], num_experts: int) -> list[int]:
    """have: the experts that each rank holds (one may be held by several) -> the owner of each
    expert.

    With q, r = divmod(num_experts, ranks), r ranks own q + 1 experts and the others q. As many
    experts as possible stay with a rank that holds them. Every rank computes the same result.
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

    Each rank may own `quota` experts; `extras` ranks may own one more, and a rank can take over
    that right from another.
    """

    def __init__(self, have: Sequence[set[int]], num_experts: int) -> None:
        self.have = have
        self.owners: list[int | None] = [None] * num_experts
        self.owned: list[set[int]] = [set() for _ in have]
        self.quota, self.extras = divmod(num_experts, len(have))

    def keep(self, expert: int) -> None:
        """Makes a rank that holds the expert its owner, if other experts can move for it."""
        self._assign_to_holder(expert, set())

    def give(self, expert: int) -> None:
        """Makes the rank with the fewest experts the owner."""
        rank = min(range(len(self.have)), key=lambda rank: len(self.owned[rank]))
        self._own(rank, expert)

    def _assign_to_holder(self, expert: int, visited: set[int]) -> bool:
        """Finds an owner among the expert's holders. Ranks in `visited` are known to be full."""
        for rank, held in enumerate(self.have):
            if expert in held and rank not in visited and self._make_room(rank, visited):
                self._own(rank, expert)
                return True
        return False

    def _make_room(self, rank: int, visited: set[int]) -> bool:
        """Whether the rank may own one more expert: at once, or after another expert has moved."""
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
        """Moves one of the rank's experts to another of its holders."""
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
    """Returns the bytes of the most experts that one worker of a stage can hold with at least
    `cluster.min_engines` engines. While experts move, a layer's new experts need memory in addition
    to those that the worker holds already."""
    engines, parallel = config.cluster.min_engines, config.parallel
    most = []
    for layer in layers:
        count = layer.traits.count
        copies = count + min(parallel.redundant_experts, count * (engines - 1))
        most.append(-(-copies // (engines * parallel.tensor)) * layer.expert_bytes)
    return sum(most) + (max(most, default=0) if parallel.balance_steps else 0)


def rebalance(
    model: Model, mesh: Mesh, model_config: ModelConfig, on_progress: Callable[[], None]
) -> tuple[int, int]:
    """Moves the experts of this stage to the owners that `place_experts` selects. Every worker of
    `mesh.expert` calls this at the same time.

    An expert that a peer has is received from the peer, one that no rank has is loaded from the
    checkpoint, and one that another rank owns is dropped. `on_progress` is called for each expert
    that has moved and each part that was read. Returns how many experts came to this rank (moved,
    loaded); an expert counts once, however many layers it came to. Raises `GroupError` if a peer
    fails, and `ValueError` if the checkpoint cannot be read; in both cases each expert of this rank
    is either complete in a layer or absent from it.
    """
    if not isinstance(model, MixtureOfExperts) or not (layers := model.moe_layers()):
        return 0, 0
    here, moved, missing = mesh.expert.rank, set(), defaultdict(list)
    for at, (layer, have) in enumerate(zip(layers, holdings(layers, mesh), strict=True)):
        layer.share(None)
        holders = [(owner,) for owner in place_experts(have, layer.traits.count)]
        moved.update(move_experts(layer, mesh, have, holders, on_progress))
        for expert, (owner,) in enumerate(holders):
            if owner == here and not any(expert in held for held in have):
                missing[expert].append(at)
    _load(model, mesh, missing, model_config, on_progress)
    return len(moved), len(missing)


def holdings(layers: Sequence[MoE], mesh: Mesh) -> list[list[set[int]]]:
    """Returns [layers][ranks of `mesh.expert`]: the experts that each rank holds. Every rank calls
    it."""
    held = torch.zeros(1, len(layers), layers[0].traits.count, dtype=torch.int64)
    for at, layer in enumerate(layers):
        held[0, at, list(layer.local_experts)] = 1
    gathered = mesh.expert.all_gather(held.to(mesh.device), 0).cpu()
    return [
        [set(of_rank[at].nonzero().flatten().tolist()) for of_rank in gathered]
        for at in range(len(layers))
    ]


def move_experts(
    layer: MoE,
    mesh: Mesh,
    have: Sequence[set[int]],
    holders: Sequence[Sequence[int]],
    on_progress: Callable[[], None],
) -> list[int]:
    """Sends the experts of one layer to their new holders, [experts][ranks], and drops the others;
    an expert that no rank has is skipped. Every rank calls this. Returns the experts that came to
    this rank. Raises `GroupError` if a peer fails: then no expert was added or dropped."""
    came: dict[int, Expert] = {}
    for expert, ranks in enumerate(holders):
        sources = [rank for rank, held in enumerate(have) if expert in held]
        for target in ranks if sources else ():
            if target not in sources:
                arrived = _move(layer, mesh, expert, sources[0], target)
                if arrived is not None:
                    came[expert] = layer.pack_expert(arrived)
                on_progress()
    if mesh.device.type == "cuda":  # transfers are only enqueued
        torch.cuda.current_stream(mesh.device).synchronize()
    mesh.check()
    layer.local_experts.update(came)
    for expert, ranks in enumerate(holders):
        if mesh.expert.rank not in ranks:
            layer.local_experts.pop(expert, None)
    return list(came)


def _move(layer: MoE, mesh: Mesh, expert: int, source: int, target: int) -> Expert | None:
    """Sends or receives one expert; returns it if it came to this rank. All ranks do the moves in
    the same order, so there is no deadlock."""
    if mesh.expert.rank == source:
        _send_expert(layer, expert, mesh.expert, target)
    return _receive_expert(layer, mesh.expert, source) if mesh.expert.rank == target else None


def _send_expert(layer: MoE, expert: int, group: Group, target: int) -> None:
    """Sends an expert of this rank to rank `target` of `group`, which calls `_receive_expert`."""
    for weight in layer.local_experts[expert]:
        if layer.may_quantize:
            group.send(_described(weight), target).wait()
        for tensor in _parts(weight):
            group.send(tensor, target).wait()


def _receive_expert(layer: MoE, group: Group, source: int) -> Expert:
    """Receives an expert from rank `source` of `group`; a weight of floats is not packed yet."""
    gate_up, down = (_receive(layer, empty, group, source) for empty in layer.make_expert())
    return gate_up, down


def _receive(layer: MoE, empty: torch.Tensor, group: Group, source: int) -> Weight:
    """Receives one weight; `empty` has its shape and the type of its floats."""
    form = None
    if layer.may_quantize:
        form = _form(group.recv(torch.zeros(_DESCRIBED, dtype=torch.int64), source))
    if form is None:
        return group.recv(empty, source)
    outs, inputs = empty.shape
    integers = group.recv(torch.empty(outs, inputs, dtype=torch.uint8), source)
    scales, *mins = (
        group.recv(torch.empty(outs, inputs // form.group, dtype=form.scale_type), source)
        for _ in range(1 + form.has_mins)
    )
    low = mins[0] if mins else None
    quantized = QuantizedTensor(integers, scales, low, form.bits, form.numbers)
    return layer.packing.pack(quantized, empty.dtype)


def _parts(weight: Weight) -> Iterator[torch.Tensor]:
    if isinstance(weight, PackedQuantizedTensor):
        quantized = weight.unpack()
        yield quantized.integers
        yield quantized.scales
        if quantized.mins is not None:
            yield quantized.mins
    else:
        yield weight.unpack() if isinstance(weight, PackedTensor) else weight


def _described(weight: Weight) -> torch.Tensor:
    """Returns the form of a weight as numbers; zeros for floats."""
    if not isinstance(weight, PackedQuantizedTensor):
        return torch.zeros(_DESCRIBED, dtype=torch.int64)
    form = weight.form
    wide = form.scale_type == torch.float32
    numbers = [*Numbers].index(form.numbers)
    return torch.tensor([form.bits, form.group, form.has_mins, wide, numbers], dtype=torch.int64)


def _form(described: torch.Tensor) -> QuantizedForm | None:
    """Returns the form that `_described` describes; None: floats."""
    bits, group, has_mins, wide, numbers = described.tolist()
    if not bits:
        return None
    scale_type = torch.float32 if wide else torch.float16
    return QuantizedForm(bits, group, bool(has_mins), scale_type, [*Numbers][numbers])


def _load(
    model: MixtureOfExperts,
    mesh: Mesh,
    missing: Mapping[int, Sequence[int]],
    model_config: ModelConfig,
    on_progress: Callable[[], None],
) -> None:
    """Reads experts from the checkpoint for the layers that lack them. Runs after all moves, so
    that no peer waits for this rank's disk."""
    if not missing:
        return
    layers = model.moe_layers()
    made: dict[int, dict[int, Expert]] = {expert: {} for expert in missing}
    shards, matrices = {}, []
    for expert, lacking in missing.items():
        plain = {at: layers[at].make_expert() for at in lacking}
        shards[expert] = list(model.expert_weight_shards(expert, plain))
        made[expert].update(plain)
        matrices += [
            NamedMatrix(f"expert {expert}", ExpertWeight(made[expert], at, part))
            for at in lacking
            for part in range(2)
        ]
        del plain
    packing = layers[0].packing
    load_experts(
        shards,
        mesh,
        model_config,
        lambda _share: on_progress(),
        matrices_to_load(matrices, packing, mesh.device),
    )
    while made:  # packed weights exist twice only for one expert of one layer
        expert, weights = made.popitem()
        while weights:
            at, loaded = weights.popitem()
            layers[at].local_experts[expert] = layers[at].pack_expert(loaded)
