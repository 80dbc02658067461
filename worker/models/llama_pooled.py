"""Decoders of the llama family that pool: embedders, and classifiers with a `score` head."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from swell.worker.comm.mesh import Mesh
from swell.worker.layers.linear import ReplicatedLinear
from swell.worker.layers.weight_shard import ALL, WeightShard, empty_parameter
from swell.worker.models.llama import HEAD, LlamaModel
from swell.worker.models.llama_traits import TRAITS

_CAUSAL, _CLASSIFIER = "ForCausalLM", "ForSequenceClassification"


class TokenClassifier(nn.Module):
    """A classifier with one class: the logit of one token minus that of another, computed by a
    causal language model's head. Its sigmoid is the probability of the token if only these two can
    be sampled."""

    def __init__(self, token_ids: tuple[int, int], vocab: int, hidden: int) -> None:
        """`token_ids`: the token against the class, and the token for it."""
        super().__init__()
        self.weight = empty_parameter(2, hidden)
        self._token_ids, self._shape = token_ids, (vocab, hidden)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [P, hidden] -> [P, 1]"""
        no, yes = torch.nn.functional.linear(hidden, self.weight).split(1, -1)
        return yes - no

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        """Yields two rows of the head."""
        for row, token in enumerate(self._token_ids):
            index = (slice(token, token + 1), ALL)
            yield WeightShard(f"{name}.weight", self.weight[row : row + 1], index, self._shape)


class LlamaForPooling(LlamaModel):
    """A llama model that pools: it returns the hidden states, `score` of them, or the difference of
    two tokens' logits."""

    traits_table = {
        name.removesuffix(_CAUSAL) + suffix: traits
        for name, traits in TRAITS.items()
        for suffix in ("Model", _CAUSAL, _CLASSIFIER)
    }

    classifier: ReplicatedLinear | TokenClassifier | None

    def __init__(
        self,
        config: Any,
        mesh: Mesh,
        device: torch.device,
        dtype: torch.dtype,
        max_positions: int,
    ) -> None:
        super().__init__(config, mesh, device, dtype, max_positions)
        if not mesh.is_last_stage:
            self.classifier = None

    def make_head(self, config: Any) -> None:
        self.classifier = None
        if config.architectures[0].endswith(_CLASSIFIER):
            self.classifier = ReplicatedLinear(config.hidden_size, config.num_labels, bias=False)
        elif token_ids := getattr(config, "classifier_token_ids", None):
            self.classifier = TokenClassifier(token_ids, config.vocab_size, config.hidden_size)

    def weight_shards(self, stored: Collection[str] = ()) -> Iterator[WeightShard]:
        """Yields the shards to read. Embedders are also stored without the prefix `model.`."""
        whole = not stored or any(name.startswith("model.") for name in stored)
        prefix = "model." if whole else ""
        yield from self.backbone_shards(prefix, f"{prefix}embed_tokens")
        if self.classifier is not None:
            name = "score"
            if isinstance(self.classifier, TokenClassifier):
                is_tied = f"{HEAD}.weight" not in stored if stored else self.tied
                name = f"{prefix}embed_tokens" if is_tied else HEAD
            yield from self.classifier.weight_shards(name)
