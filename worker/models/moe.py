"""Mixture-of-experts models with llama's structure: mixtral and qwen3-moe differ in a few traits.

Some or all layers have a router and many experts instead of a single feed-forward block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from swell.worker.comm.mesh import Mesh
from swell.worker.layers.mlp import FeedForward
from swell.worker.layers.moe import ExpertTraits, MoE, PlainExpert
from swell.worker.layers.weight_shard import WeightShard
from swell.worker.models.llama import LlamaForCausalLM
from swell.worker.models.llama_traits import Traits
from swell.worker.moe.experts import place_experts


@dataclass(frozen=True, kw_only=True)
class MoETraits(Traits):
    experts: ExpertTraits
    sparse: tuple[bool, ...]
    """Whether each layer has experts."""


def _mixtral(config: Any) -> MoETraits:
    layers = config.num_hidden_layers
    experts = ExpertTraits(
        count=config.num_local_experts,
        size=config.intermediate_size,
        top_k=config.num_experts_per_tok,
        renormalize=True,
        round_weights=False,
        names=("w1", "w3", "w2"),
    )
    return MoETraits(
        windows=(config.sliding_window or 0,) * layers,
        mlp_name="block_sparse_moe",
        experts=experts,
        sparse=(True,) * layers,
    )


def _qwen3_moe(config: Any) -> MoETraits:
    layers, bias = config.num_hidden_layers, bool(config.attention_bias)
    experts = ExpertTraits(
        count=config.num_experts,
        size=config.moe_intermediate_size,
        top_k=config.num_experts_per_tok,
        renormalize=bool(config.norm_topk_prob),
        round_weights=True,
        names=("gate_proj", "up_proj", "down_proj"),
    )
    dense, period = set(config.mlp_only_layers or ()), config.decoder_sparse_step
    return MoETraits(
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        windows=(config.sliding_window or 0,) * layers,
        experts=experts,
        sparse=tuple(i not in dense and (i + 1) % period == 0 for i in range(layers)),
    )


TRAITS: dict[str, Callable[[Any], MoETraits]] = {
    "MixtralForCausalLM": _mixtral,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}
"""Architecture in config.json -> its traits."""


class MoeForCausalLM(LlamaForCausalLM):
    """One tensor rank's part of the dense layers of one pipeline stage, and some of its experts.

    If engines share experts, a rank starts without experts; otherwise the engine's tensor ranks
    divide them, and `weight_shards` includes this rank's experts.
    """

    activations = ("silu",)
    traits_table = TRAITS
    takes_adapters = False

    def __init__(
        self,
        config: Any,
        mesh: Mesh,
        device: torch.device,
        dtype: torch.dtype,
        max_positions: int,
    ) -> None:
        super().__init__(config, mesh, device, dtype, max_positions)
        traits = TRAITS[config.architectures[0]](config)
        self.expert_traits = traits.experts
        self.expert_layers = tuple(i for i, sparse in enumerate(traits.sparse) if sparse)
        """The layers that have experts, in all stages."""
        if mesh.shares_experts:
            return
        for layer in self.moe_layers():
            owners = place_experts([set()] * mesh.tensor.size, layer.traits.count)
            for expert, owner in enumerate(owners):
                if owner == mesh.tensor_rank:
                    layer.local_experts[expert] = layer.make_expert()

    def make_mlp(self, config: Any, traits: Traits, layer: int) -> FeedForward:
        assert isinstance(traits, MoETraits)
        if traits.sparse[layer]:
            return MoE(config.hidden_size, traits.experts, self.mesh)
        return super().make_mlp(config, traits, layer)

    def moe_layers(self) -> list[MoE]:
        """Returns the layers of this stage that have experts, in order."""
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, MoE)]

    def expert_weight_shards(
        self, expert: int, weights: Mapping[int, PlainExpert]
    ) -> Iterator[WeightShard]:
        """Returns the shards that fill an expert's weights; `weights`: index of the layer among
        `moe_layers` -> the expert's weights."""
        names = [
            (f"model.layers.{i}.{layer.mlp_name}", layer.mlp)
            for i, layer in zip(self.range, self.layers, strict=True)
            if isinstance(layer.mlp, MoE)
        ]
        for at, part in weights.items():
            name, layer = names[at]
            yield from layer.expert_weight_shards(name, expert, part)
