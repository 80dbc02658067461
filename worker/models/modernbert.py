"""ModernBERT: an encoder with rotary positions, gated feed-forward blocks and attention windows.

    x = norm(word[ids])
    for each layer:   x = x + attention(norm(x));   x = x + down(gelu(gate(norm(x))) * up(norm(x)))
    x = norm(x)

The first layer's attention reads x itself. Some layers attend to all tokens of a text, the others
only to nearby tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from swell.kernels.activation import gelu, gelu_and_mul
from swell.kernels.attention import WHOLE_ROW
from swell.kernels.qkv import prepare
from swell.worker.comm.mesh import Group, Mesh
from swell.worker.layers.attention import Attention
from swell.worker.layers.embedding import VocabParallelEmbedding
from swell.worker.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from swell.worker.layers.norm import LayerNorm
from swell.worker.layers.rotary import RotaryEmbedding
from swell.worker.layers.weight_shard import WeightShard, set_types
from swell.worker.models.bert import check_encoder

if TYPE_CHECKING:
    from swell.kernels.attention import AttentionMetadata
    from swell.worker.step.input_batch import InputBatch
    from swell.worker.step.intermediate import IntermediateTensors

Angles = tuple[Tensor, Tensor]
"""cos and sin of the tokens' positions, [T, head_dim / 2] each."""


class ModernBertLayer(nn.Module):
    def __init__(self, config: Any, layer: int, group: Group) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.num_attention_heads
        self.kind = config.layer_types[layer]
        self.dim = hidden // heads
        bias, what = bool(config.attention_bias), "intermediate_size"
        self.attention_norm = _norm(config) if layer else nn.Identity()
        self.qkv = QKVParallelLinear(hidden, heads, heads, self.dim, group, bias)
        near = config.sliding_window if self.kind == "sliding_attention" else None
        self.attention = Attention(
            self.qkv.heads,
            self.qkv.heads,
            self.dim,
            self.dim**-0.5,
            window=0 if near is None else near + 1,
            lookahead=WHOLE_ROW if near is None else near,
        )
        self.out = RowParallelLinear(hidden, hidden, group, bias)
        self.mlp_norm = _norm(config)
        inner, bias = config.intermediate_size, bool(config.mlp_bias)
        self.gate_up = MergedColumnParallelLinear(hidden, [inner] * 2, group, bias, what)
        self.down = RowParallelLinear(inner, hidden, group, bias, what=what)

    def forward(self, x: Tensor, angles: Angles, meta: AttentionMetadata) -> Tensor:
        """x [T, hidden] -> [T, hidden]"""
        qkv, caches = self.qkv(self.attention_norm(x)), self.attention.caches
        q = prepare(qkv, None, 0.0, *angles, caches, meta.slot_mapping)
        x = x + self.out(self.attention(q, meta))
        return x + self.down(gelu_and_mul(self.gate_up(self.mlp_norm(x))))

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        if isinstance(self.attention_norm, LayerNorm):
            yield from self.attention_norm.weight_shards(f"{name}.attn_norm")
        yield from self.qkv.weight_shards(f"{name}.attn.Wqkv")
        yield from self.out.weight_shards(f"{name}.attn.Wo")
        yield from self.mlp_norm.weight_shards(f"{name}.mlp_norm")
        yield from self.gate_up.weight_shards(f"{name}.mlp.Wi")
        yield from self.down.weight_shards(f"{name}.mlp.Wo")


class ModernBertClassifier(nn.Module):
    """`out(norm(gelu(dense(x))))`"""

    def __init__(self, config: Any) -> None:
        super().__init__()
        if config.classifier_activation != "gelu":
            act = config.classifier_activation
            raise ValueError(f"classifier_activation={act!r} is not supported (only 'gelu')")
        hidden = config.hidden_size
        self.dense = ReplicatedLinear(hidden, hidden, bool(config.classifier_bias))
        self.norm = _norm(config)
        self.out = ReplicatedLinear(hidden, config.num_labels)

    def forward(self, x: Tensor) -> Tensor:
        """x [P, hidden] -> [P, classes]"""
        return self.out(self.norm(gelu(self.dense(x))))

    def weight_shards(self) -> Iterator[WeightShard]:
        yield from self.dense.weight_shards("head.dense")
        yield from self.norm.weight_shards("head.norm")
        yield from self.out.weight_shards("classifier")


class ModernBert(nn.Module):
    """One tensor rank's part of the model."""

    classifier: ModernBertClassifier | None

    def __init__(
        self,
        config: Any,
        mesh: Mesh,
        device: torch.device,
        dtype: torch.dtype,
        max_positions: int,
    ) -> None:
        """Raises `ValueError` for a configuration that this model does not cover, or that the mesh
        cannot split."""
        super().__init__()
        check_encoder(config, mesh)
        self.vocab_size, self.hidden = int(config.vocab_size), int(config.hidden_size)
        self.embed = VocabParallelEmbedding(config.vocab_size, self.hidden, mesh.tensor)
        self.embed_norm, self.norm = _norm(config), _norm(config)
        count = config.num_hidden_layers
        layers = (ModernBertLayer(config, i, mesh.tensor) for i in range(count))
        self.layers = cast("Sequence[ModernBertLayer]", nn.ModuleList(layers))
        self.classifier = None
        if config.architectures[0].endswith("ForSequenceClassification"):
            self.classifier = ModernBertClassifier(config)
        set_types(self, dtype)
        dim = self.hidden // config.num_attention_heads
        self.ropes = nn.ModuleDict(
            {
                kind: RotaryEmbedding(dim, max_positions, config.rope_parameters[kind])
                for kind in dict.fromkeys(config.layer_types)
            }
        ).to(device)

    def forward(self, batch: InputBatch, intermediate: IntermediateTensors | None = None) -> Tensor:
        """Returns the last hidden states of all T tokens, [T, hidden]."""
        angles = {kind: rope(batch.positions) for kind, rope in self.ropes.items()}
        x = self.embed_norm(self.embed(batch.input_ids))
        for layer in self.layers:
            x = layer(x, angles[layer.kind], batch.attention)
        return self.norm(x)

    def attention_layers(self) -> list[Attention]:
        """Returns the attention layers, in order."""
        return [layer.attention for layer in self.layers]

    def weight_shards(self, stored: Collection[str] = ()) -> Iterator[WeightShard]:
        """Returns the parts of the checkpoint that this rank needs; `stored`: the checkpoint's
        names."""
        whole = not stored or any(name.startswith("model.") for name in stored)
        prefix = "model." if whole else ""
        yield from self.embed.weight_shards(f"{prefix}embeddings.tok_embeddings")
        yield from self.embed_norm.weight_shards(f"{prefix}embeddings.norm")
        for i, layer in enumerate(self.layers):
            yield from layer.weight_shards(f"{prefix}layers.{i}")
        yield from self.norm.weight_shards(f"{prefix}final_norm")
        if self.classifier is not None:
            yield from self.classifier.weight_shards()


def _norm(config: Any) -> LayerNorm:
    return LayerNorm(config.hidden_size, config.norm_eps, bool(config.norm_bias))
