"""Loads the draft model of a target model: a small model, an EAGLE head, or an MTP layer."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from swell.configs.drafts import BY_WORKERS, DraftModelConfig
from swell.configs.files.sharded_index import is_sharded
from swell.configs.pooling import PoolingSpec
from swell.configs.schema import Config, ModelConfig, ParallelConfig
from swell.configs.section import ConfigError
from swell.worker.comm.mesh import Mesh
from swell.worker.drafting.draft_model import NO_DRAFT_MODEL, DraftModel, NoDraftModel
from swell.worker.drafting.draft_runner import DraftRunner
from swell.worker.drafting.eagle_model import (
    EMBEDDING,
    HEAD,
    Eagle3Model,
    EagleModel,
    layers_read,
)
from swell.worker.drafting.eagle_runner import EagleRunner
from swell.worker.drafting.mtp_model import MtpModel
from swell.worker.hf_config import load_config, max_positions, resolve_dtype
from swell.worker.hf_config import max_model_len as max_length
from swell.worker.layers.packed_weight import pack_weights
from swell.worker.loader import LoadShare, checkpoint_names, load_weight_shards, load_weights
from swell.worker.memory import kv_cache
from swell.worker.model_interfaces import HasKVCache, Model, SupportsLayerTaps
from swell.worker.models import build_model, resolve_ties
from swell.worker.models.text_part import text_names

_KEY = re.compile(rf"(?<![.\w])model\.({'|'.join(DraftModelConfig.__struct_fields__)})\b")
"""Matches the configuration keys in errors about a model, so that they can be replaced by those of
the draft model."""
_HEADS: dict[str, type[EagleModel] | type[Eagle3Model]] = {
    "eagle": EagleModel,
    "eagle3": Eagle3Model,
}
_MODEL_EMBEDDING, _MODEL_HEAD = "model.embed_tokens", "lm_head"


def load_draft_model(
    config: Config,
    hf_config: Any,
    pooling: PoolingSpec | None,
    model: Model,
    mesh: Mesh,
    progress: Callable[[], None],
) -> NoDraftModel:
    """Returns the draft model of a worker at this position in the mesh. `hf_config`, `pooling`,
    `model`: those of the target model; `progress` is called from time to time.

    Raises `ConfigError` for a draft model that cannot propose tokens of the target model.
    """
    small, method = config.drafts.model, config.drafts.method
    if method not in BY_WORKERS:
        return NO_DRAFT_MODEL
    key, what = "drafts.method", f"drafts.method={method}"
    if small is not None:
        key, what = "drafts.model", f"drafts.model={small.path!r}"
    if pooling is not None:
        raise ConfigError(
            f"{what}: model.path={config.model.path!r} pools and does not generate text, so it "
            "cannot use drafts; set drafts.method=none",
            key,
        )
    loading = _Loading(config, hf_config, model, mesh, progress)
    try:
        if method in _HEADS:
            return loading.load_head(method)
        if method == "mtp":
            return loading.load_mtp_layer()
        return loading.load_small_model() if mesh.is_output_rank else NO_DRAFT_MODEL
    except ValueError as error:
        text = str(error) if small is None else _KEY.sub(r"drafts.model.\1", str(error))
        raise ConfigError(f"{what}: {text}", key) from error


class _Loading:
    def __init__(
        self,
        config: Config,
        hf_config: Any,
        model: Model,
        mesh: Mesh,
        progress: Callable[[], None],
    ) -> None:
        self._served, self._hf_config, self._model = config.model, hf_config, model
        self._text_config = hf_config.get_text_config()
        self._mesh, self._progress, self._device = mesh, progress, mesh.device
        self._config = _model_config(config.model, config.drafts.model)
        self._max_len = max_length(config.model, self._text_config)
        self._cache_dtype = partial(kv_cache.cache_dtype, config.cache)

    def load_small_model(self) -> NoDraftModel:
        hf_config = load_config(self._config)
        self._check_vocabulary(hf_config)
        positions = max_positions(hf_config)
        if positions is not None and positions < self._max_len:
            raise ValueError(
                f"it has {positions} positions, but sequences have up to {self._max_len} tokens; "
                f"set model.max_model_len={positions} or less"
            )
        dtype = resolve_dtype(self._config, hf_config)
        alone = Mesh.build(ParallelConfig(), 0, device=self._device)
        model = build_model(self._config, hf_config, alone, self._device, dtype)
        loaded = load_weights(model, self._config, self._on_loaded)
        self._finish(model)
        make_runner = partial(DraftRunner, model, self._served.enforce_eager)
        return DraftModel(
            model, self._cache_dtype(dtype), loaded.nbytes, loaded.mapped_bytes, make_runner
        )

    def load_head(self, method: str) -> NoDraftModel:
        """Loads an EAGLE head. Every worker of the last stage computes what a head reads; only the
        output rank holds the head."""
        if method == "eagle3":
            self._tap_layers()
        if not self._mesh.is_output_rank:
            return NoDraftModel(reads_hidden=True)
        hf_config = load_config(self._config)
        self._check_vocabulary(hf_config)
        dtype = resolve_dtype(self._config, hf_config)
        stored = _stored_names(self._config)
        head = _HEADS[method](
            hf_config, self._text_config, stored, self._max_len, self._device, dtype
        )
        nbytes = load_weight_shards(head.weight_shards, self._config, self._on_loaded)
        nbytes += self._borrow(head)
        if isinstance(head, Eagle3Model):
            self._check_offsets(head)
        self._finish(head)
        return DraftModel(
            head, self._cache_dtype(dtype), nbytes, 0, partial(EagleRunner, head), reads_hidden=True
        )

    def load_mtp_layer(self) -> NoDraftModel:
        """Loads an MTP layer, like `load_head`; the layer may be among the target model's own
        weights."""
        if not self._mesh.is_output_rank:
            return NoDraftModel(reads_hidden=True)
        stored = _stored_names(self._config)
        if stored and self._config is not self._served:
            self._refuse_other_model(load_config(self._config))
        dtype = resolve_dtype(self._config, self._hf_config)
        layer = MtpModel(self._hf_config, self._served, stored, self._device, dtype)
        nbytes = load_weight_shards(layer.weight_shards, self._config, self._on_loaded)
        nbytes += self._borrow(layer)
        layer.check()
        self._finish(layer)
        return DraftModel(
            layer,
            self._cache_dtype(dtype),
            nbytes,
            0,
            partial(EagleRunner, layer),
            reads_hidden=True,
        )

    def _tap_layers(self) -> None:
        layers = layers_read(load_config(self._config), self._text_config.num_hidden_layers)
        assert isinstance(self._model, SupportsLayerTaps), "every decoder does"
        self._model.tap_layers(layers)

    def _borrow(self, head: EagleModel | Eagle3Model | MtpModel) -> int:
        """Fills the parts for which the head does not have weights from the target model's
        checkpoint; returns their bytes."""
        borrowed = head.borrowed()
        if not borrowed:
            return 0
        if is_sharded(self._served):
            raise ValueError(
                f"it has no {' and no '.join(borrowed)} of its own, and the weights of the model "
                "were saved by `swell save-sharded`; serve the model's original folder, or add "
                "these tensors to the head's"
            )
        stored = text_names(checkpoint_names(self._served))
        config = resolve_ties(
            self._served, self._hf_config, resolve_dtype(self._served, self._hf_config)
        )
        is_tied = bool(getattr(config, "tie_word_embeddings", False))
        if stored and f"{_MODEL_HEAD}.weight" not in stored:
            is_tied = True
        embedding = _MODEL_EMBEDDING
        if stored and f"{embedding}.weight" not in stored:
            embedding = _MODEL_HEAD  # a tied tensor may be stored under either name
        names = {EMBEDDING: embedding, HEAD: embedding if is_tied else _MODEL_HEAD}
        for kind, name in names.items():
            names[kind] = stored.get(f"{name}.weight", name).removesuffix(".weight")
        shards = [shard for kind, fill in borrowed.items() for shard in fill(names[kind])]
        return load_weight_shards(lambda _stored: shards, self._served, self._on_loaded)

    def _refuse_other_model(self, hf_config: Any) -> None:
        """Raises `ValueError` unless its layers may be those of the target model."""
        text = hf_config.get_text_config()
        for key in ("model_type", "hidden_size", "vocab_size", "num_hidden_layers"):
            own, target = getattr(text, key, None), getattr(self._text_config, key, None)
            if own != target:
                raise ValueError(
                    f"its layer was made for a model with {key}={own!r}, but this model has "
                    f"{target!r}; use the layer of this model"
                )

    def _check_vocabulary(self, hf_config: Any) -> None:
        """Raises `ValueError` unless its vocabulary has the size of the target model's."""
        own, target = hf_config.get_text_config().vocab_size, self._text_config.vocab_size
        if own != target:
            raise ValueError(
                f"its vocabulary has {own} tokens, but the model's has {target}; use a draft "
                "model with the same vocabulary"
            )

    def _check_offsets(self, head: Eagle3Model) -> None:
        tokens = torch.arange(len(head.offsets), device=self._device) + head.offsets
        if tokens.min() < 0 or tokens.max() >= self._text_config.vocab_size:
            raise ValueError(
                f"its tensor 'd2t' names the tokens {int(tokens.min())} to {int(tokens.max())}, "
                f"but the model's vocabulary has {self._text_config.vocab_size} tokens; copy or "
                "download the file again"
            )

    def _finish(self, model: HasKVCache) -> None:
        pack_weights(model)
        for layer in model.attention_layers():
            layer.register_forward_hook(lambda *call: self._progress())

    def _on_loaded(self, _share: LoadShare) -> None:
        self._progress()


def _stored_names(model_config: ModelConfig) -> frozenset[str]:
    """Returns the tensor names of a head's folder; none for random weights, so the head borrows
    what it can."""
    if is_sharded(model_config):
        raise ValueError("its weights were saved by `swell save-sharded`; use its original folder")
    return frozenset(checkpoint_names(model_config))


def _model_config(model: ModelConfig, small: DraftModelConfig | None) -> ModelConfig:
    if small is None:
        return model
    return ModelConfig(
        path=small.path,
        load_format=small.load_format,
        dtype=small.dtype,
        device=model.device,
        backend=small.backend,
        seed=model.seed,
        runner="generate",
    )
