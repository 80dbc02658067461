"""Computes one vector for a text from the hidden states of a model's last layer.

hidden states -> first, last or mean -> classifier or Dense modules -> dimensions, activation
                 `PoolingReader`        `Pooler.head`                  `activate`
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from swell.configs.files.bounded_files import MAX_CONFIG_BYTES, parse_json, read_file
from swell.configs.pooling import DenseSpec, PoolingSpec, read_pooling
from swell.configs.schema import ConfigError, ModelConfig
from swell.worker.layers.linear import ReplicatedLinear
from swell.worker.layers.packed_weight import Packing, pack_weights
from swell.worker.layers.weight_shard import WeightShard, materialize
from swell.worker.loader import load_weight_shards
from swell.worker.model_folder import WEIGHT_FILES, model_folder
from swell.worker.model_interfaces import HasPositionTable, HasSegments, Model, PoolingModel
from swell.worker.sampler_wire import Activation, PoolingParams

TEXT_FILES = ("*.json",)

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"Identity": lambda x: x, "Tanh": torch.tanh}
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.NONE: lambda x: x,
    Activation.NORMALIZE: lambda x: nn.functional.normalize(x, dim=-1),
    Activation.SIGMOID: torch.sigmoid,
    Activation.SOFTMAX: lambda x: torch.softmax(x, -1),
}


class Dense(nn.Module):
    """`activation(W x + b)`, a module of sentence-transformers."""

    def __init__(self, spec: DenseSpec) -> None:
        super().__init__()
        self.linear = ReplicatedLinear(spec.in_features, spec.out_features, spec.bias)
        self._activation = _ACTIVATIONS[spec.activation]

    def forward(self, x: Tensor) -> Tensor:
        """x [P, in] -> [P, out]"""
        return self._activation(self.linear(x))

    def weight_shards(self, stored: Collection[str]) -> Iterator[WeightShard]:
        """Returns the shards of the file in the module's own folder."""
        yield from self.linear.weight_shards("linear")


class Pooler:
    """The modules that follow the pooled hidden states of one model."""

    def __init__(self, spec: PoolingSpec, model: PoolingModel) -> None:
        self.spec = spec
        self._classifier = model.classifier
        self._dense: list[Dense] = []
        self._segment_starts = model.segment_starts if isinstance(model, HasSegments) else {}
        self.hidden_size, self.out_features = int(model.hidden), spec.size

    def load(
        self, folder: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Reads the Dense modules. Raises `ValueError` for files that do not hold them."""
        size = self.hidden_size
        for spec in self.spec.dense:
            if spec.in_features != size:
                raise ValueError(
                    f"{spec.folder}/config.json has in_features={spec.in_features}, but its input "
                    f"has {size} values; use the files of one model"
                )
            dense = Dense(spec)
            materialize(dense, device, dtype)
            own = msgspec.structs.replace(config, path=str(folder / spec.folder))
            load_weight_shards(dense.weight_shards, own)
            pack_weights(dense, Packing(config.exact))
            self._dense.append(dense)
            size = spec.out_features

    def on_request(self, slot: int, params: PoolingParams) -> None:
        """Adds the request that takes a slot. Encoders that distinguish the two texts of a pair
        need to know where the second one begins."""
        if params.segment_start:
            self._segment_starts[slot] = params.segment_start
        else:
            self._segment_starts.pop(slot, None)

    def head(self, pooled: Tensor) -> Tensor:
        """pooled [P, hidden] -> [P, out] float32"""
        if self._classifier is not None:
            pooled = self._classifier(pooled)
        for dense in self._dense:
            pooled = dense(pooled)
        assert pooled.shape[1] == self.out_features, pooled.shape
        return pooled.float()


def read_model_pooling(config: ModelConfig) -> PoolingSpec | None:
    """Returns how the model pools. Returns None if the model samples tokens, or if there is no such
    model, which `load_config` explains. Raises `ConfigError`."""
    try:
        folder = model_folder(config.path, TEXT_FILES)
        parse_json(read_file(folder / "config.json", MAX_CONFIG_BYTES))
    except Exception:
        return None

    def read(name: str) -> Any:
        file = folder / name
        try:
            return parse_json(read_file(file, MAX_CONFIG_BYTES)) if file.is_file() else None
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"{file} is not JSON ({error}); copy it there again") from None

    return read_pooling(
        config.runner, config.pooling, read, config.classifier_tokens, config.pair_template
    )


def load_pooler(
    spec: PoolingSpec,
    model: PoolingModel,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> Pooler:
    """Returns the pooler of `model`, with its weights loaded."""
    pooler = Pooler(spec, model)
    pooler.load(model_folder(config.path, WEIGHT_FILES), config, device, dtype)
    return pooler


def max_text_tokens(
    spec: PoolingSpec, model: Model, config: ModelConfig, positions: int, step_tokens: int | None
) -> int:
    """Returns the longest text in tokens, for a model with this many positions. `step_tokens`: the
    most tokens of one step, into which the whole text must fit; None: a text may be computed in
    several steps. Raises `ValueError` if the configured length is longer."""
    if isinstance(model, HasPositionTable):
        positions = min(positions, model.max_positions)
    limits = {"the number of positions of the model": positions}
    if spec.max_tokens is not None:
        limits["max_seq_length of the model's folder"] = spec.max_tokens
    if step_tokens is not None:
        limits["scheduler.max_tokens_per_step (a text is computed in one step)"] = step_tokens
    name, longest = min(limits.items(), key=lambda limit: limit[1])
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ValueError(
            f"model.max_model_len={config.max_model_len} is above {longest}, {name}; lower it"
        )
    return min(config.max_model_len or longest, longest)
