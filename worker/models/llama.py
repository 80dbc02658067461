"""The llama family as one implementation: llama, mistral, qwen2, qwen3, phi3, gemma2 and gemma3
differ in a few traits.

    x = embed(ids)
    for each layer:   x = x + attention(norm(x));   x = x + down(act(gate(norm(x))) * up(norm(x)))
    logits = head(norm(x))

In some families, the outputs of attention and of `down` are normalized before they are added, and
logits are bounded.

The tokens of all rows are concatenated, [T, hidden]; only attention knows where rows end. The sum
`x` is passed on as a pair (x, residual), so that each addition is fused with the norm after it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import nn

from swell.kernels.activation import scale
from swell.kernels.linear import embedding
from swell.kernels.qkv import prepare
from swell.kernels.sample import greedy_sample
from swell.worker.comm.mesh import Group, Mesh
from swell.worker.layers.attention import Attention
from swell.worker.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from swell.worker.layers.linear import LinearLayer, QKVParallelLinear, RowParallelLinear
from swell.worker.layers.lora import ActiveAdapters
from swell.worker.layers.mlp import GATED, FeedForward, GatedMLP
from swell.worker.layers.norm import RMSNorm
from swell.worker.layers.rotary import RotaryEmbedding
from swell.worker.layers.weight_shard import WeightShard, set_types
from swell.worker.models.llama_traits import TRAITS, Traits
from swell.worker.step.intermediate import IntermediateTensors, stage_layers
from swell.worker.step.layer_taps import LayerTaps

if TYPE_CHECKING:
    from swell.kernels.attention import AttentionMetadata
    from swell.worker.step.input_batch import InputBatch


HEAD, EMBEDDING = "lm_head", "model.embed_tokens"
ONE_KIND = "all"
"""The kind of the rotary angles if they are the same in all layers."""


class LlamaAttention(nn.Module):
    def __init__(
        self, config: Any, traits: Traits, layer: int, group: Group, in_features: int
    ) -> None:
        """`in_features`: the size of an input; an output has the model's hidden size."""
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = head_dim(config)
        self.qkv = QKVParallelLinear(
            in_features, heads, kv_heads, self.head_dim, group, traits.qkv_bias
        )
        self.out = RowParallelLinear(
            heads * self.head_dim, config.hidden_size, group, traits.out_bias
        )
        self.q_norm = self.k_norm = None
        self.eps, self.qkv_names = config.rms_norm_eps, traits.qkv_names
        if traits.qk_norm:
            self.q_norm, self.k_norm = (traits.norm(self.head_dim, self.eps) for _ in range(2))
        self.attention = Attention(
            self.qkv.heads,
            self.qkv.kv_heads,
            self.head_dim,
            traits.scale or self.head_dim**-0.5,
            window=traits.windows[layer] if traits.windows else 0,
            softcap=traits.softcap,
        )

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        meta: AttentionMetadata,
        hidden_indices: torch.Tensor | None,
    ) -> torch.Tensor:
        norms, caches = None, self.attention.caches
        if self.q_norm is not None and self.k_norm is not None:
            norms = self.q_norm.weight, self.k_norm.weight
        q = prepare(self.qkv(x), norms, self.eps, cos, sin, caches, meta.slot_mapping)
        return self.out(_of(self.attention(q, meta), hidden_indices))

    def linear_layers(self, name: str) -> Iterator[tuple[LinearLayer, tuple[str, ...]]]:
        """Yields each linear layer with its matrices' names in the checkpoint."""
        yield self.qkv, tuple(f"{name}.{each}" for each in self.qkv_names)
        yield self.out, (f"{name}.o_proj",)

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        for layer, names in self.linear_layers(name):
            yield from layer.weight_shards(*names)
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.weight_shards(f"{name}.q_norm")
            yield from self.k_norm.weight_shards(f"{name}.k_norm")


class LlamaLayer(nn.Module):
    def __init__(
        self,
        config: Any,
        traits: Traits,
        layer: int,
        group: Group,
        mlp: FeedForward,
        attention_norm: RMSNorm | None = None,
    ) -> None:
        """`attention_norm`: the norm before the attention; None: one of the traits' kind."""
        super().__init__()
        hidden, eps, names = config.hidden_size, config.rms_norm_eps, traits.norms
        self.attention_norm = attention_norm or traits.norm(hidden, eps)
        self.attention = LlamaAttention(config, traits, layer, group, hidden)
        self.mlp_norm = traits.norm(hidden, eps)
        self.mlp = mlp
        self.attention_output_norm = self.mlp_output_norm = None
        if names.attention_output:
            self.attention_output_norm = traits.norm(hidden, eps)
        if names.mlp_output:
            self.mlp_output_norm = traits.norm(hidden, eps)
        self.mlp_name, self.norm_names = traits.mlp_name, names
        self.rope_kind = traits.rope_kinds[layer] if traits.rope_kinds else ONE_KIND

    def norm_input(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x and residual [T, hidden], whose sum is the layer's input; residual None: the input is
        x. Returns the normed input, and the input."""
        if residual is None:
            return self.attention_norm(x), x
        return self.attention_norm.add(x, residual)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        meta: AttentionMetadata,
        hidden_indices: torch.Tensor | None,
        slots: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x and residual [T, hidden], the results of `norm_input` -> a pair whose sum is the
        layer's output, both [W, hidden], for the tokens `hidden_indices` [W] int64; None: for all
        tokens. slots [W] int64, or None: of these tokens, one with the slot -1 is padding. The K
        and V of all T tokens are written."""
        x = self.attention(x, cos, sin, meta, hidden_indices)
        if self.attention_output_norm is not None:
            x = self.attention_output_norm(x)
        x, residual = self.mlp_norm.add(x, _of(residual, hidden_indices))
        x = self.mlp(x, slots)
        if self.mlp_output_norm is not None:
            x = self.mlp_output_norm(x)
        return x, residual

    def linear_layers(self, name: str) -> Iterator[tuple[LinearLayer, tuple[str, ...]]]:
        """Yields each linear layer with its matrices' names in the checkpoint."""
        yield from self.attention.linear_layers(f"{name}.self_attn")
        if isinstance(self.mlp, GatedMLP):
            yield from self.mlp.linear_layers(f"{name}.{self.mlp_name}")

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        norms = (
            self.attention_norm,
            self.mlp_norm,
            self.attention_output_norm,
            self.mlp_output_norm,
        )
        for norm, norm_name in zip(norms, self.norm_names, strict=True):
            if norm is not None:
                yield from norm.weight_shards(f"{name}.{norm_name}")
        yield from self.attention.weight_shards(f"{name}.self_attn")
        yield from self.mlp.weight_shards(f"{name}.{self.mlp_name}")


class LlamaModel(nn.Module):
    """One tensor rank's part of one pipeline stage. On the last stage, `make_head` adds the layers
    after the normed hidden states."""

    layers: Sequence[LlamaLayer]
    activations: ClassVar[Collection[str]] = GATED
    traits_table: ClassVar[Mapping[str, Callable[[Any], Traits]]] = TRAITS

    def __init__(
        self,
        config: Any,
        mesh: Mesh,
        device: torch.device,
        dtype: torch.dtype,
        max_positions: int,
    ) -> None:
        """`config` is the model's; its parameters are on the meta device.

        Raises `ValueError` for a configuration that this model does not cover, or that the mesh
        cannot split.
        """
        super().__init__()
        _check(config, self.activations)
        traits = self.traits_table[config.architectures[0]](config)
        group, self.mesh, self.hidden = mesh.tensor, mesh, config.hidden_size
        self.embedding_width = int(config.hidden_size)
        """The size of one prompt embedding."""
        self.active_adapters = ActiveAdapters()
        self.device, self.dtype = device, dtype
        self.vocab_size = int(config.vocab_size)
        stages = mesh.pipeline.size
        self.num_layers = int(config.num_hidden_layers)
        self.range = stage_layers(config.num_hidden_layers, stages, mesh.stage)
        self.taps = LayerTaps(self.range)
        layers = (
            LlamaLayer(config, traits, i, group, self.make_mlp(config, traits, i))
            for i in self.range
        )
        self.layers = cast("Sequence[LlamaLayer]", nn.ModuleList(layers))
        self.tied = bool(config.tie_word_embeddings)
        if mesh.is_first_stage:
            self.embed = VocabParallelEmbedding(config.vocab_size, config.hidden_size, group)
        if mesh.is_last_stage:
            self.norm = traits.norm(config.hidden_size, config.rms_norm_eps)
            self.make_head(config)
        set_types(self, dtype)
        self.logits_softcap = traits.logits_softcap
        self.embedding_scale = traits.embedding_scale
        self.embeds_plainly = traits.embedding_scale == 1.0
        rotary_dim = int(head_dim(config) * traits.rotated)
        self.ropes = nn.ModuleDict(
            {
                kind: RotaryEmbedding(rotary_dim, max_positions, parameters)
                for kind, parameters in rope_kinds(config, traits).items()
            }
        ).to(device)

    def make_head(self, config: Any) -> None:
        """Adds the layers after the last hidden states."""
        raise NotImplementedError

    def make_mlp(self, config: Any, traits: Traits, layer: int) -> FeedForward:
        """Returns the feed-forward block of a layer."""
        return GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            self.mesh.tensor,
            traits.mlp_bias,
            activation(config),
            traits.gate_up_names,
        )

    def forward(
        self, batch: InputBatch, intermediate: IntermediateTensors | None = None
    ) -> torch.Tensor | IntermediateTensors:
        """Computes the stage's layers for a flat batch of T tokens.

        The first stage reads `batch.input_ids`, the others `intermediate`. The last stage returns
        the normed hidden states of `batch.hidden_indices`, [W, hidden], or of all tokens.
        """
        residual: torch.Tensor | None = None
        self.active_adapters.tokens = batch.adapters
        if self.mesh.is_first_stage:
            x = self.embed(batch.input_ids)
            if self.embedding_scale != 1.0:
                x = scale(x, self.embedding_scale)
            if batch.prompt_embeds is not None:
                x = batch.prompt_embeds.put_into(x)
        else:
            assert intermediate is not None, "a later stage needs the output of the previous stage"
            x, residual = intermediate.hidden_states, intermediate.residual
        self.taps.begin(() if intermediate is None else intermediate.layer_inputs)
        tapped = self.taps.tapped
        angles = {kind: rope(batch.positions) for kind, rope in self.ropes.items()}
        last = self.layers[-1] if self.mesh.is_last_stage else None
        for index, layer in zip(self.range, self.layers, strict=True):
            hidden_indices = batch.hidden_indices if layer is last else None
            slots = batch.padded_slots(hidden_indices)
            x, residual = layer.norm_input(x, residual)
            if index in tapped:
                self.taps.record(residual)
            cos, sin = angles[layer.rope_kind]
            x, residual = layer(x, residual, cos, sin, batch.attention, hidden_indices, slots)
        if not self.mesh.is_last_stage:
            return IntermediateTensors(x, residual, self.taps.leaving())
        assert residual is not None, "each stage must have a layer"
        x, _ = self.norm.add(x, residual)
        return x

    def tap_layers(self, layers: Sequence[int]) -> None:
        """Captures the inputs of these layers, in any stage, from now on."""
        self.taps.select(layers)

    def attention_layers(self) -> list[Attention]:
        """Returns the attention layers of this stage, in order: each needs a KV cache."""
        return [layer.attention.attention for layer in self.layers]

    def linear_layers(self) -> Iterator[tuple[LinearLayer, tuple[str, ...]]]:
        """Yields the linear layers of this stage, each with its matrices' names in the
        checkpoint."""
        for i, layer in zip(self.range, self.layers, strict=True):
            yield from layer.linear_layers(f"model.layers.{i}")

    def linear_modules(self) -> list[str]:
        """Returns the checkpoint's names of all linear layers' matrices, in all stages."""
        return [
            name
            for i in range(self.num_layers)
            for _, names in self.layers[0].linear_layers(f"model.layers.{i}")
            for name in names
        ]

    def make_empty_intermediate(self, tokens: int) -> IntermediateTensors:
        """Returns buffers for the activations of the previous stage, for `tokens` tokens."""
        x, residual, *others = torch.empty(
            2 + self.taps.num_earlier, tokens, self.hidden, dtype=self.dtype, device=self.device
        )
        return IntermediateTensors(x, residual, others)

    def backbone_shards(
        self, prefix: str = "model.", embedding: str = EMBEDDING
    ) -> Iterator[WeightShard]:
        """Yields all shards except the head's. `prefix`: the prefix of the checkpoint's names;
        `embedding`: the full name of the embedding, without `.weight`."""
        if self.mesh.is_first_stage:
            yield from self.embed.weight_shards(embedding)
        for i, layer in zip(self.range, self.layers, strict=True):
            yield from layer.weight_shards(f"{prefix}layers.{i}")
        if self.mesh.is_last_stage:
            yield from self.norm.weight_shards(f"{prefix}norm")


class LlamaForCausalLM(LlamaModel):
    """A llama model with a head that computes logits."""

    takes_adapters = True

    def make_head(self, config: Any) -> None:
        self.head = ParallelLMHead(config.vocab_size, config.hidden_size, self.mesh.tensor)
        if self.tied and self.mesh.is_first_stage:
            self.head.tie(self.embed)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, hidden] of the last stage -> logits [S, vocab] float32, on each tensor rank"""
        return self.head(hidden, self.logits_softcap)

    def argmax(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [S, hidden] of the last stage -> the tokens of the largest logits, [S] int64, and
        these logits, [S] float32"""
        if self.logits_softcap:  # different outputs of the head may become equal logits
            return greedy_sample(self.compute_logits(hidden))
        return self.head.argmax(hidden)

    def weight_shards(self, stored: Collection[str] = ()) -> Iterator[WeightShard]:
        """Returns the parts of the checkpoint that this rank needs; `stored`: the checkpoint's
        names."""
        embedding = EMBEDDING
        if self.tied and stored and f"{EMBEDDING}.weight" not in stored:
            embedding = HEAD  # a tied tensor may be stored under either name
        yield from self.backbone_shards(embedding=embedding)
        if self.mesh.is_last_stage:
            if not self.tied:
                yield from self.head.weight_shards(HEAD)
            elif not self.mesh.is_first_stage:
                yield from self.head.weight_shards(embedding)

    @staticmethod
    def tied_pairs(config: Any, stored: Collection[str]) -> list[tuple[str, str]]:
        """Returns the names of the head and the embedding, if both are stored."""
        pair = (f"{HEAD}.weight", f"{EMBEDDING}.weight")
        return [pair] if all(name in stored for name in pair) else []


def _of(x: torch.Tensor, hidden_indices: torch.Tensor | None) -> torch.Tensor:
    return x if hidden_indices is None else embedding(hidden_indices, x)


def head_dim(config: Any) -> int:
    """Returns the size of one attention head; a config may derive it from the hidden size."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def activation(config: Any) -> str:
    """Returns the name of the activation in the feed-forward block."""
    return getattr(config, "hidden_activation", None) or config.hidden_act


def rope_kinds(config: Any, traits: Traits) -> dict[str, dict[str, Any]]:
    """Returns the kinds of angles, each with its rope's parameters."""
    if not traits.rope_kinds:
        rope = rope_parameters(config, config.rope_parameters)
        if traits.rotated != 1.0:
            del rope["partial_rotary_factor"]  # the angles are those of the rotated part
        return {ONE_KIND: rope}
    kinds = dict.fromkeys(traits.rope_kinds)
    return {kind: rope_parameters(config, config.rope_parameters[kind]) for kind in kinds}


def rope_parameters(config: Any, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a rope's parameters; a missing factor is computed from the lengths."""
    rope = dict(parameters)
    if rope.get("rope_type") in ("yarn", "longrope") and rope.get("factor") is None:
        old = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        rope["factor"] = config.max_position_embeddings / old
    return rope


def _check(config: Any, activations: Collection[str]) -> None:
    if activation(config) not in activations:
        raise ValueError(
            f"hidden_act={activation(config)!r} is not supported natively (known: "
            f"{', '.join(activations)}); try model.backend=transformers"
        )
