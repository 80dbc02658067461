"""Encoders of the BERT family as one implementation: bert and roberta; XLM-R and camembert are
roberta models.

    x = norm(word[ids] + position[positions] + segment[segments])
    for each layer:   x = norm(x + attention(x));   x = norm(x + down(gelu(up(x))))

Tokens attend to all tokens of their text, so a whole text is computed in one step. The tokens of
all texts are concatenated, [T, hidden], without padding.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from swell.kernels.attention import WHOLE_ROW
from swell.kernels.host.device_copy import to_device
from swell.kernels.linear import embedding
from swell.worker.comm.mesh import Group, Mesh
from swell.worker.layers.attention import Attention
from swell.worker.layers.embedding import VocabParallelEmbedding
from swell.worker.layers.linear import QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from swell.worker.layers.mlp import GeluMLP
from swell.worker.layers.norm import LayerNorm
from swell.worker.layers.weight_shard import (
    WeightShard,
    empty_parameter,
    replicated_shard,
    set_types,
)

if TYPE_CHECKING:
    from swell.kernels.attention import AttentionMetadata
    from swell.worker.step.input_batch import InputBatch
    from swell.worker.step.intermediate import IntermediateTensors


class BertEmbeddings(nn.Module):
    def __init__(self, config: Any, group: Group, first_position: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.word = VocabParallelEmbedding(config.vocab_size, hidden, group)
        self.position = empty_parameter(config.max_position_embeddings, hidden)
        self.segment = empty_parameter(config.type_vocab_size, hidden)
        self.norm = LayerNorm(hidden, config.layer_norm_eps)
        self._first_position = first_position

    def forward(self, ids: Tensor, positions: Tensor, segments: Tensor | None) -> Tensor:
        """ids, positions, segments [T] int64 -> [T, hidden]; segments None: all tokens are in the
        first segment."""
        x = self.word(ids)
        x = x + (self.segment[0] if segments is None else embedding(segments, self.segment))
        return self.norm(x, embedding(positions + self._first_position, self.position))

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        yield from self.word.weight_shards(f"{name}.word_embeddings")
        yield replicated_shard(f"{name}.position_embeddings.weight", self.position)
        yield replicated_shard(f"{name}.token_type_embeddings.weight", self.segment)
        yield from self.norm.weight_shards(f"{name}.LayerNorm")


class BertLayer(nn.Module):
    def __init__(self, config: Any, group: Group) -> None:
        super().__init__()
        hidden, heads, eps = config.hidden_size, config.num_attention_heads, config.layer_norm_eps
        dim = hidden // heads
        self.qkv = QKVParallelLinear(hidden, heads, heads, dim, group, bias=True)
        own = self.qkv.heads
        self.attention = Attention(own, own, dim, dim**-0.5, lookahead=WHOLE_ROW)
        self.out = RowParallelLinear(hidden, hidden, group, bias=True)
        self.attention_norm = LayerNorm(hidden, eps)
        self.mlp = GeluMLP(hidden, config.intermediate_size, group)
        self.mlp_norm = LayerNorm(hidden, eps)

    def forward(self, x: Tensor, meta: AttentionMetadata) -> Tensor:
        """x [T, hidden] -> [T, hidden]"""
        q, k, v = self.qkv(x).split(self.qkv.sizes, dim=-1)
        x = self.attention_norm(self.out(self.attention.write_and_attend(q, k, v, meta)), x)
        return self.mlp_norm(self.mlp(x), x)

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        own = f"{name}.attention.self"
        yield from self.qkv.weight_shards(f"{own}.query", f"{own}.key", f"{own}.value")
        yield from self.out.weight_shards(f"{name}.attention.output.dense")
        yield from self.attention_norm.weight_shards(f"{name}.attention.output.LayerNorm")
        yield from self.mlp.weight_shards(name)
        yield from self.mlp_norm.weight_shards(f"{name}.output.LayerNorm")


class BertClassifier(nn.Module):
    """`out(tanh(dense(x)))`"""

    def __init__(self, config: Any, names: tuple[str, str]) -> None:
        super().__init__()
        self.dense = ReplicatedLinear(config.hidden_size, config.hidden_size)
        self.out = ReplicatedLinear(config.hidden_size, config.num_labels)
        self._names = names

    def forward(self, x: Tensor) -> Tensor:
        """x [P, hidden] -> [P, classes]"""
        return self.out(torch.tanh(self.dense(x)))

    def weight_shards(self) -> Iterator[WeightShard]:
        dense, out = self._names
        yield from self.dense.weight_shards(dense)
        yield from self.out.weight_shards(out)


class Bert(nn.Module):
    """One tensor rank's part of the model."""

    classifier: BertClassifier | None

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
        self._is_bert = config.model_type == "bert"
        # roberta's positions begin after that of the padding token.
        first = 0 if self._is_bert else config.pad_token_id + 1
        self.max_positions = config.max_position_embeddings - first
        self.embeddings = BertEmbeddings(config, mesh.tensor, first)
        layers = (BertLayer(config, mesh.tensor) for _ in range(config.num_hidden_layers))
        self.layers = cast("Sequence[BertLayer]", nn.ModuleList(layers))
        self.classifier = None
        if config.architectures[0].endswith("ForSequenceClassification"):
            own = ("bert.pooler.dense", "classifier")
            names = own if self._is_bert else ("classifier.dense", "classifier.out_proj")
            self.classifier = BertClassifier(config, names)
        self.segment_starts: dict[int, int] = {}
        """Slot -> position of the second text of a pair."""
        self._has_segments = config.type_vocab_size > 1
        set_types(self, dtype)

    def forward(self, batch: InputBatch, intermediate: IntermediateTensors | None = None) -> Tensor:
        """Returns the last hidden states of all T tokens, [T, hidden]."""
        x = self.embeddings(batch.input_ids, batch.positions, self._segments(batch))
        for layer in self.layers:
            x = layer(x, batch.attention)
        return x

    def _segments(self, batch: InputBatch) -> Tensor | None:
        """Returns [T] int64: 1 for tokens of second texts; None: there are no second texts."""
        if not (self._has_segments and self.segment_starts):
            return None
        segments, end = np.zeros(batch.num_tokens, dtype=np.int64), 0
        for slot, count in zip(batch.plan.slots, batch.plan.num_tokens, strict=True):
            begin, end = end, end + count
            segments[begin + self.segment_starts.get(slot, count) : end] = 1
        return to_device(segments, batch.input_ids.device)

    def attention_layers(self) -> list[Attention]:
        """Returns the attention layers, in order."""
        return [layer.attention for layer in self.layers]

    def weight_shards(self, stored: Collection[str] = ()) -> Iterator[WeightShard]:
        """Returns the parts of the checkpoint that this rank needs; `stored`: the checkpoint's
        names."""
        base = "bert." if self._is_bert else "roberta."
        prefix = base if not stored or any(name.startswith(base) for name in stored) else ""
        yield from self.embeddings.weight_shards(f"{prefix}embeddings")
        for i, layer in enumerate(self.layers):
            yield from layer.weight_shards(f"{prefix}encoder.layer.{i}")
        if self.classifier is not None:
            yield from self.classifier.weight_shards()


def check_encoder(config: Any, mesh: Mesh) -> None:
    """Raises `ValueError` for a config that none of the encoders here supports."""
    act = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    if act != "gelu":
        raise ValueError(f"hidden_act={act!r} is not supported for an encoder (only 'gelu')")
    kind = getattr(config, "position_embedding_type", None) or "absolute"
    if kind not in ("absolute", "rope"):
        raise ValueError(f"position_embedding_type={kind!r} is not supported (only 'absolute')")
    if mesh.pipeline.size > 1:
        raise ValueError(
            f"parallel.pipeline={mesh.pipeline.size}: an encoder is not split into stages; set "
            "parallel.pipeline=1, and parallel.tensor to use several workers"
        )
