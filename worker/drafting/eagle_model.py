"""Heads that predict the next token from the hidden states of a target model of the llama family.

EAGLE (Li et al. 2024, arXiv:2401.15077): f are the target model's normed hidden states and x is the
next token. The head predicts f of the next position, from which the target model's own LM head
computes logits.

    own = layers(fc([embed(x), f]));   logits = head(own)

There is no norm before the attention of the first layer, and no norm after the last layer.

EAGLE-3 (Li et al. 2025, arXiv:2503.01840) fuses the inputs of three layers of the target model. It
has its own norm and LM head, often over only the most frequent tokens.

    f = fc([a, b, c]);   y = [norm(embed(x)), norm(f)]
    own = f + attention(y);   own = own + mlp(norm(own));   logits = head(norm(own))

With `norm_before_residual`, the first sum uses norm(f) instead of f. After the first pass, `own` of
the position before replaces f. Names and shapes of weights are those of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from swell.configs.schema import ParallelConfig
from swell.kernels.linear import embedding
from swell.worker.comm.mesh import Mesh
from swell.worker.drafting.draft_runner import StepHidden
from swell.worker.layers.attention import Attention
from swell.worker.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from swell.worker.layers.linear import ReplicatedLinear
from swell.worker.layers.mlp import GatedMLP
from swell.worker.layers.norm import RMSNorm
from swell.worker.layers.rotary import RotaryEmbedding
from swell.worker.layers.weight_shard import WeightShard, materialize, replicated_shard
from swell.worker.models.llama import (
    LlamaAttention,
    LlamaLayer,
    head_dim,
    rope_parameters,
)
from swell.worker.models.llama_traits import Traits

if TYPE_CHECKING:
    from swell.worker.step.input_batch import InputBatch

EMBEDDING, HEAD, FUSION = "embed_tokens", "lm_head", "fc"
OFFSETS = "d2t"
"""[draft vocabulary] int64: the offset that is added to each of the head's token ids to get the id
in the target model's vocabulary."""


def traits_of(stored: Collection[str], layer: str) -> Traits:
    """Returns the traits that the names of the stored tensors show, regardless of the family that
    config.json names."""

    def has(name: str) -> bool:
        return f"{layer}.{name}" in stored

    return Traits(
        qkv_bias=has("self_attn.q_proj.bias"),
        out_bias=has("self_attn.o_proj.bias"),
        mlp_bias=has("mlp.gate_proj.bias"),
        qk_norm=has("self_attn.q_norm.weight"),
    )


class _Head(nn.Module):
    """The common base of both kinds of heads."""

    head: ParallelLMHead

    def __init__(
        self,
        config: Any,
        model: Any,
        stored: Collection[str],
        positions: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`config`: the head's config; `model`: the target model's config; `stored`: names of the
        tensors in the head's checkpoint; `positions`: tokens of the longest sequence. Raises
        `ValueError` for a head of another model."""
        super().__init__()
        self.group = Mesh.build(ParallelConfig(), 0, device=device).tensor
        self.stored, self.device, self.dtype = stored, device, dtype
        self.embed = VocabParallelEmbedding(config.vocab_size, config.hidden_size, self.group)
        self.make_layers(config, model)
        materialize(self, device, dtype)
        rope = rope_parameters(config, config.rope_parameters)
        self.rope = RotaryEmbedding(head_dim(config), positions, rope)
        self.rope.to(device)

    def make_layers(self, config: Any, model: Any) -> None:
        """Adds the layers after the embedding, including `head`."""
        raise NotImplementedError

    def borrowed(self) -> dict[str, Callable[[str], Iterable[WeightShard]]]:
        """Returns `EMBEDDING` or `HEAD` -> the shards that fill it from a tensor of the target
        model's checkpoint."""
        layers = self._of_tokens().items()
        return {name: layer.weight_shards for name, layer in layers if not self._has(name)}

    def weight_shards(self, stored: Collection[str] = ()) -> Iterator[WeightShard]:
        """Returns the shards to read from the head's own checkpoint."""
        for name, layer in self._of_tokens().items():
            if self._has(name):
                yield from layer.weight_shards(name)

    def _of_tokens(self) -> dict[str, VocabParallelEmbedding | ParallelLMHead]:
        return {EMBEDDING: self.embed, HEAD: self.head}

    def _has(self, name: str) -> bool:
        return f"{name}.weight" in self.stored


class _NoNorm(RMSNorm):
    def __init__(self) -> None:
        nn.Module.__init__(self)

    def forward(self, x: Tensor) -> Tensor:
        return x

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        yield from ()


class EagleModel(_Head):
    def make_layers(self, config: Any, model: Any) -> None:
        size, stored = config.hidden_size, self.stored
        if size != model.hidden_size:
            raise ValueError(
                f"its hidden_size={size} is not the model's, {model.hidden_size}; a head is made "
                "for one model: use the head of this model"
            )
        self.fusion = ReplicatedLinear(2 * size, size, bias=f"{FUSION}.bias" in stored)
        layers = [
            LlamaLayer(
                config,
                traits_of(stored, f"layers.{at}"),
                at,
                self.group,
                _mlp(config),
                attention_norm=None if at else _NoNorm(),
            )
            for at in range(config.num_hidden_layers)
        ]
        self.layers = cast("Sequence[LlamaLayer]", nn.ModuleList(layers))
        self.head = ParallelLMHead(config.vocab_size, size, self.group)

    def select(self, hidden: StepHidden) -> Sequence[Tensor]:
        return [hidden.last]

    def features(self, selected: Sequence[Tensor]) -> Tensor:
        return selected[0].to(self.dtype)

    def forward(self, ids: Tensor, features: Tensor, batch: InputBatch) -> tuple[Tensor, Tensor]:
        x = self.fusion(torch.cat((self.embed(ids), features), -1))
        residual: Tensor | None = None
        cos, sin = self.rope(batch.positions)
        for layer in self.layers:
            hidden_indices = batch.hidden_indices if layer is self.layers[-1] else None
            x, residual = layer.norm_input(x, residual)
            x, residual = layer(x, residual, cos, sin, batch.attention, hidden_indices)
        own = x if residual is None else x + residual
        return own, own

    def argmax(self, hidden: Tensor) -> Tensor:
        return self.head.argmax(hidden)[0]

    def attention_layers(self) -> list[Attention]:
        return [layer.attention.attention for layer in self.layers]

    def weight_shards(self, stored: Collection[str] = ()) -> Iterator[WeightShard]:
        yield from super().weight_shards(stored)
        yield from self.fusion.weight_shards(FUSION)
        for at, layer in enumerate(self.layers):
            yield from layer.weight_shards(f"layers.{at}")


def _mlp(config: Any, bias: bool = False) -> GatedMLP:
    group = Mesh.build(ParallelConfig(), 0).tensor
    return GatedMLP(config.hidden_size, config.intermediate_size, group, bias)


class _Eagle3Layer(nn.Module):
    def __init__(self, config: Any, traits: Traits, group: Any) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.embed_norm, self.feature_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.attention = LlamaAttention(config, traits, 0, group, in_features=2 * size)
        self.mlp_norm = RMSNorm(size, eps)
        self.mlp = _mlp(config, traits.mlp_bias)
        self._adds_normed = bool(getattr(config, "norm_before_residual", False))

    def forward(
        self, embeds: Tensor, features: Tensor, cos: Tensor, sin: Tensor, batch: InputBatch
    ) -> tuple[Tensor, Tensor]:
        """embeds, features [T, hidden] -> a pair whose sum is `own`, [S, hidden] each"""
        normed, hidden_indices = self.feature_norm(features), batch.hidden_indices
        x = torch.cat((self.embed_norm(embeds), normed), -1)
        features = normed if self._adds_normed else features
        x = self.attention(x, cos, sin, batch.attention, hidden_indices)
        residual = features if hidden_indices is None else embedding(hidden_indices, features)
        x, residual = self.mlp_norm.add(x, residual)
        return self.mlp(x), residual

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        yield from self.embed_norm.weight_shards(f"{name}.input_layernorm")
        yield from self.feature_norm.weight_shards(f"{name}.hidden_norm")
        yield from self.attention.weight_shards(f"{name}.self_attn")
        yield from self.mlp_norm.weight_shards(f"{name}.post_attention_layernorm")
        yield from self.mlp.weight_shards(f"{name}.mlp")


class Eagle3Model(_Head):
    def make_layers(self, config: Any, model: Any) -> None:
        size, stored = config.hidden_size, self.stored
        if size != model.hidden_size and not self._has(EMBEDDING):
            raise ValueError(
                f"it has no {EMBEDDING}, and the model's has another size, {model.hidden_size} "
                f"instead of hidden_size={size}"
            )
        self._layer = "midlayer" if "midlayer.mlp.gate_proj.weight" in stored else "layers.0"
        self.fusion = ReplicatedLinear(3 * model.hidden_size, size, bias=f"{FUSION}.bias" in stored)
        self.layer = _Eagle3Layer(config, traits_of(stored, self._layer), self.group)
        self.norm = RMSNorm(size, config.rms_norm_eps)
        vocab = getattr(config, "draft_vocab_size", None) or config.vocab_size
        self.head = ParallelLMHead(vocab, size, self.group)
        offsets = torch.zeros(vocab, dtype=torch.int64, device=self.device)
        self.offsets = nn.Parameter(offsets, requires_grad=False)

    def select(self, hidden: StepHidden) -> Sequence[Tensor]:
        return hidden.layer_inputs

    def features(self, selected: Sequence[Tensor]) -> Tensor:
        fused: Tensor = self.fusion(torch.cat(list(selected), -1).to(self.dtype))
        return fused

    def forward(self, ids: Tensor, features: Tensor, batch: InputBatch) -> tuple[Tensor, Tensor]:
        cos, sin = self.rope(batch.positions)
        x, residual = self.layer(self.embed(ids), features, cos, sin, batch)
        last, own = self.norm.add(x, residual)
        return own, last

    def argmax(self, hidden: Tensor) -> Tensor:
        tokens = self.head.argmax(hidden)[0]
        return tokens + self.offsets[tokens]

    def attention_layers(self) -> list[Attention]:
        return [self.layer.attention.attention]

    def weight_shards(self, stored: Collection[str] = ()) -> Iterator[WeightShard]:
        yield from super().weight_shards(stored)
        yield from self.fusion.weight_shards(FUSION)
        yield from self.layer.weight_shards(self._layer)
        yield from self.norm.weight_shards("norm")
        if OFFSETS in self.stored:
            yield replicated_shard(OFFSETS, self.offsets)


def layers_read(config: Any, num_layers: int) -> list[int]:
    """Returns the layers of the target model whose inputs an EAGLE-3 head reads: as its config.json
    says, in one of two ways, otherwise the published ones."""
    key = "eagle_aux_hidden_state_layer_ids"
    outputs = (getattr(config, "eagle_config", None) or {}).get(key)  # the outputs of these layers
    inputs = getattr(config, key, None) or (2, num_layers // 2, num_layers - 3)
    layers = [int(each) + 1 for each in outputs] if outputs else [int(each) for each in inputs]
    if len(layers) != 3 or not all(0 <= layer < num_layers for layer in layers):
        raise ValueError(
            f"it reads the inputs of the model's layers {layers}, but the model has {num_layers}; "
            "it was made for another model"
        )
    return layers
