"""Experts of transformers models, which our kernels compute from packed weights.

transformers stores the experts of a layer as two parameters, [experts, 2 * size, hidden] and
[experts, hidden, size], and computes all of them by grouped products. Here each expert has two
matrices of its own, which are loaded and packed like those of any other layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from swell.kernels.moe import ExpertTable, combine_experts, expert_outputs
from swell.worker.layers.packed_weight import Matrix, Packable, PackedWeight, Packing
from swell.worker.layers.weight_shard import ALL, WeightShard

_NAMES = ("gate_up_proj", "down_proj")


class ExpertMatrix(PackedWeight):
    """One of the two matrices of an expert."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty_like(weight), requires_grad=False)


class Experts(Packable):
    """The experts of one layer. The class of a module is a subclass of this and of its own class in
    transformers."""

    gate_up: Any  # [experts] `ExpertMatrix`
    down: Any
    _table: ExpertTable | None

    @classmethod
    def of(cls, module: nn.Module) -> Experts:
        """Returns the experts of `module`, which they replace before its weights are loaded."""
        own = type(module)
        kind: Any = type(own.__name__, (cls, own), {})
        made: Experts = kind.__new__(kind)
        made.__dict__.update(module.__dict__)
        made._hold(*(made._parameters.pop(name) for name in _NAMES))
        return made

    def _hold(self, gate_up: Any, down: Any) -> None:
        self.gate_up, self.down = (
            nn.ModuleList(map(ExpertMatrix, stacked)) for stacked in (gate_up, down)
        )
        self._table = None

    def matrices(self) -> Iterable[tuple[str, Matrix]]:
        return ()  # those of its modules

    def on_packed(self, packing: Packing) -> None:
        self._table = self._make_table()

    def _make_table(self) -> ExpertTable:
        pairs = enumerate(zip(self.gate_up, self.down, strict=True))
        weights = {expert: (up.weight, down.weight) for expert, (up, down) in pairs}
        return ExpertTable(len(weights), torch.device("cpu"), weights)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, hidden], [T, k], [T, k] -> [T, hidden]"""
        table = self._table or self._make_table()
        outputs = hidden_states.new_zeros(*top_k_index.shape, hidden_states.shape[-1])
        expert_outputs(hidden_states, top_k_index, table, outputs)
        return combine_experts(outputs, top_k_weights)

    def weight_shards(self, path: str) -> Iterator[WeightShard]:
        """Returns the shards under the names of the parameters that this module had."""
        for name, matrices in zip(_NAMES, (self.gate_up, self.down), strict=True):
            shape = (len(matrices), *matrices[0].weight.shape)
            for expert, matrix in enumerate(matrices):
                index = (slice(expert, expert + 1), ALL, ALL)
                yield WeightShard(f"{path}.{name}", matrix.weight[None], index, shape)


def use_expert_kernels(model: nn.Module) -> None:
    """Lets kernels compute the experts of a model on a CPU, where their formula is that of
    `kernels/moe.py`: SwiGLU without biases. A GPU computes them by transformers' grouped
    products."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and _is_computed(child):
                parent._modules[name] = Experts.of(child)


def _is_computed(module: nn.Module) -> bool:
    """Whether a module is one of transformers' expert layers with the formula and the layout that
    `Experts` has. Its decorator describes the layout."""
    from transformers.activations import SiLUActivation
    from transformers.integrations.moe import _default_apply_gate

    layout = {
        "has_gate": True,
        "has_bias": False,
        "has_post_expert_norm": False,
        "is_transposed": False,
        "is_concatenated": True,
        "_is_expert_parallel": False,
    }
    if any(getattr(module, key, None) is not value for key, value in layout.items()):
        return False
    return (
        getattr(type(module), "_apply_gate", None) is _default_apply_gate
        and isinstance(getattr(module, "act_fn", None), nn.SiLU | SiLUActivation)
        and set(module._parameters) == set(_NAMES)
        and all(p is not None and p.device.type == "cpu" for p in module._parameters.values())
    )
