"""The draft model of a worker: a small model that guesses how rows go on (`docs/drafts.md`).

The worker that returns the tokens of its engine holds it whole, however the other model is split.
Its KV lies beside that one's, in blocks of the same numbers: what holds for a block of one (whose
it is, its name, its copies elsewhere) holds for both.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from swell.configs.drafts import DraftModelConfig
from swell.configs.pooling import PoolingSpec
from swell.configs.schema import Config, ModelConfig, ParallelConfig
from swell.configs.section import ConfigError
from swell.worker import kv_cache
from swell.worker.block_tables import BlockTables
from swell.worker.draft_runner import DraftRunner, NoDraftRunner
from swell.worker.layers.packed_weight import pack_weights
from swell.worker.loader import load_config, load_weights, max_positions, resolve_dtype
from swell.worker.loader import max_model_len as max_length
from swell.worker.mesh import Mesh
from swell.worker.models import build_model
from swell.worker.request_states import RequestStates

_KEY = re.compile(rf"(?<![.\w])model\.({'|'.join(DraftModelConfig.__struct_fields__)})\b")
"""A key by which errors about any model name the way out."""


class NoDraftModel:
    """Of a worker without one."""

    nbytes = 0
    """Of its weights."""
    mapped_bytes = 0
    """As in `LoadedWeights`."""
    modules: tuple[nn.Module, ...] = ()

    def block_bytes(self, block_tokens: int) -> int:
        """Of one block in all its layers."""
        return 0

    def allocate(self, num_blocks: int, block_tokens: int, device: torch.device) -> list[Tensor]:
        """Bind a zeroed cache to every layer; all caches, each [blocks, ...]."""
        return []

    def unbind_cache(self) -> None:
        """Drop the caches, so that their memory can be freed."""

    def make_runner(
        self, states: RequestStates, blocks: BlockTables, max_tokens: int
    ) -> NoDraftRunner:
        """What computes it; `max_tokens`: of one step."""
        return NoDraftRunner()


NO_DRAFT_MODEL = NoDraftModel()


class DraftModel(NoDraftModel):
    """Its weights are loaded."""

    def __init__(self, model: Any, dtype: torch.dtype, nbytes: int, mapped_bytes: int) -> None:
        self._model, self._dtype = model, dtype
        self.nbytes, self.mapped_bytes = nbytes, mapped_bytes
        self.modules = (model,)

    def block_bytes(self, block_tokens: int) -> int:
        layers = self._model.attention_layers()
        return kv_cache.bytes_per_block(layers, block_tokens, self._dtype)

    def allocate(self, num_blocks: int, block_tokens: int, device: torch.device) -> list[Tensor]:
        layers = self._model.attention_layers()
        kv_cache.allocate(layers, num_blocks, block_tokens, self._dtype, device)
        return [cache for layer in layers for cache in (layer.k_cache, layer.v_cache)]

    def unbind_cache(self) -> None:
        for layer in self._model.attention_layers():
            layer.unbind_cache()

    def make_runner(
        self, states: RequestStates, blocks: BlockTables, max_tokens: int
    ) -> NoDraftRunner:
        return DraftRunner(self._model, states, blocks, max_tokens)


def load_draft_model(
    config: Config,
    hf_config: Any,
    pooling: PoolingSpec | None,
    mesh: Mesh,
    device: torch.device,
    progress: Callable[[], None],
) -> NoDraftModel:
    """The draft model of a worker at this place of the mesh. `hf_config`, `pooling`: of the other
    model; `progress` is called now and then.

    Raises `ConfigError` for one that cannot guess tokens of the other.
    """
    small = config.drafts.model
    if small is None:
        return NO_DRAFT_MODEL
    if pooling is not None:
        raise ConfigError(
            f"drafts.model={small.path!r}: model.path={config.model.path!r} pools, and samples no "
            "tokens that could be guessed; set drafts.method=none",
            "drafts.model",
        )
    if not mesh.is_output_rank:
        return NO_DRAFT_MODEL
    model_config = _model_config(config.model, small)
    max_model_len = max_length(config.model, hf_config)
    try:
        return _load(model_config, hf_config, max_model_len, device, progress)
    except ValueError as error:
        text = _KEY.sub(r"drafts.model.\1", str(error))
        raise ConfigError(f"drafts.model={small.path!r}: {text}", "drafts.model") from error


def _load(
    model_config: ModelConfig,
    hf_config: Any,
    max_model_len: int,
    device: torch.device,
    progress: Callable[[], None],
) -> DraftModel:
    small_config = load_config(model_config)
    _check_fit(small_config, hf_config, max_model_len)
    dtype = resolve_dtype(model_config, small_config)
    alone = Mesh.build(ParallelConfig(), 0, device=device)
    model: Any = build_model(model_config, small_config, alone, device, dtype)
    loaded = load_weights(model, model_config, lambda done_bytes, all_bytes: progress())
    pack_weights(model)
    for layer in model.attention_layers():
        layer.register_forward_hook(lambda *call: progress())
    return DraftModel(model, dtype, loaded.nbytes, loaded.mapped_bytes)


def _model_config(model: ModelConfig, small: DraftModelConfig) -> ModelConfig:
    return ModelConfig(
        path=small.path,
        load_format=small.load_format,
        dtype=small.dtype,
        device=model.device,
        backend=small.backend,
        seed=model.seed,
        runner="generate",
    )


def _check_fit(small_config: Any, hf_config: Any, max_model_len: int) -> None:
    """Raise `ValueError` unless it knows every token and every position of the other model."""
    own, wanted = (each.get_text_config().vocab_size for each in (small_config, hf_config))
    if own != wanted:
        raise ValueError(
            f"its vocabulary has {own} tokens, that of the model {wanted}; take a model of the "
            "same vocabulary"
        )
    positions = max_positions(small_config)
    if positions is not None and positions < max_model_len:
        raise ValueError(
            f"it has {positions} positions, and sequences have up to {max_model_len} tokens; set "
            f"model.max_model_len={positions} or less"
        )
