"""The models that a worker can run: a table from architecture to class, imported on first use.

Their interfaces are in `worker/model_interfaces.py`.
"""

from __future__ import annotations

import copy
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from swell.configs.pooling import DECODERS, PoolingSpec
from swell.configs.schema import ModelConfig
from swell.worker.comm.mesh import Mesh
from swell.worker.exactness import refuse_inexact, refuse_unportable
from swell.worker.layers.packed_weight import FLOATS, Packing, late_weights
from swell.worker.layers.weight_shard import allocate
from swell.worker.model_interfaces import HasMoELayers, Model

if TYPE_CHECKING:
    from swell.worker.model_interfaces import (
        HasPositionTable,
        HasSegments,
        MixtureOfExperts,
        PoolingModel,
        SupportsLoRA,
        TextGenerationModel,
    )
    from swell.worker.models.bert import Bert
    from swell.worker.models.generic.causal_lm import GenericForCausalLM
    from swell.worker.models.llama import LlamaForCausalLM
    from swell.worker.models.llama_pooled import LlamaForPooling
    from swell.worker.models.modernbert import ModernBert
    from swell.worker.models.moe import MoeForCausalLM

    # mypy checks that each class has the interfaces that its users expect.
    _GENERATING: list[type[TextGenerationModel]]
    _GENERATING = [LlamaForCausalLM, MoeForCausalLM, GenericForCausalLM]
    _POOLING: list[type[PoolingModel]] = [LlamaForPooling, Bert, ModernBert]
    _ADAPTED: list[type[SupportsLoRA]] = [LlamaForCausalLM]
    _WITH_EXPERTS: list[type[MixtureOfExperts]] = [MoeForCausalLM]
    _OF_PAIRS: list[type[HasSegments]] = [Bert]
    _OF_POSITIONS: list[type[HasPositionTable]] = [Bert]

NATIVE = {
    "LlamaForCausalLM": "swell.worker.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "swell.worker.models.llama:LlamaForCausalLM",
    "Qwen2ForCausalLM": "swell.worker.models.llama:LlamaForCausalLM",
    "Qwen3ForCausalLM": "swell.worker.models.llama:LlamaForCausalLM",
    "Phi3ForCausalLM": "swell.worker.models.llama:LlamaForCausalLM",
    "Gemma2ForCausalLM": "swell.worker.models.llama:LlamaForCausalLM",
    "Gemma3ForCausalLM": "swell.worker.models.llama:LlamaForCausalLM",
    "MixtralForCausalLM": "swell.worker.models.moe:MoeForCausalLM",
    "Qwen3MoeForCausalLM": "swell.worker.models.moe:MoeForCausalLM",
}
"""Architecture in config.json -> "module:Class"."""

POOLED = {
    **dict.fromkeys(DECODERS, "swell.worker.models.llama_pooled:LlamaForPooling"),
    **dict.fromkeys(
        ("Bert", "Roberta", "XLMRoberta", "Camembert"), "swell.worker.models.bert:Bert"
    ),
    "ModernBert": "swell.worker.models.modernbert:ModernBert",
}
"""Model family, the first part of an architecture's name -> "module:Class"."""

GENERIC = "swell.worker.models.generic.causal_lm:GenericForCausalLM"


def build_model(
    model_config: ModelConfig,
    hf_config: Any,
    mesh: Mesh,
    device: torch.device | str,
    dtype: torch.dtype,
    pooling: PoolingSpec | None = None,
    packing: Packing = FLOATS,
) -> Model:
    """Builds the part of the model that this worker runs, on `device`, without loading its weights.
    With `pooling`, builds a model that pools. Weights that `packing` quantizes are on the
    meta device: the loader allocates each when it fills it.

    `hf_config` comes from `load_config`. Raises `ValueError` for an architecture or a parallel
    layout that is not supported, if engines should share experts but the model lacks them, or if
    the mesh is exact and the model cannot be computed exactly, or if its bits would depend on the
    processor and `model.numerics` excludes that.
    """
    from swell.worker.hf_config import max_model_len

    length = max_model_len(model_config, hf_config)
    kind = _kind(model_config, hf_config, pooling)
    if mesh.shares_experts and not issubclass(kind, HasMoELayers):
        raise ValueError(
            f"parallel.expert=true: {architecture(hf_config)!r} has no experts that engines can "
            f"share with model.backend={model_config.backend}; set parallel.expert=false"
        )
    if pooling is None:
        hf_config = resolve_ties(model_config, hf_config, dtype)
    elif pooling.token_ids is not None:
        hf_config = copy.copy(hf_config)
        hf_config.classifier_token_ids = pooling.token_ids
    device = torch.device(device)
    model: Model = kind(hf_config, mesh, device, dtype, length).eval()
    allocate(model, device, late_weights(model, packing))
    if mesh.exact:
        is_native = _where(model_config, hf_config, pooling) != GENERIC
        refuse_inexact(is_native, model.attention_layers(), dtype, mesh.device)
    if model_config.numerics == "portable":
        refuse_unportable(model, dtype, mesh.device)
    return model


def resolve_ties(model_config: ModelConfig, hf_config: Any, dtype: torch.dtype) -> Any:
    """Returns the config, with ties removed if the checkpoint stores two different tensors for a
    tied pair.

    The checkpoint decides, as in transformers: it may have a head that was trained separately.
    """
    from swell.worker.loader import checkpoint_names, stored_equal

    text = hf_config.get_text_config()
    if not any(getattr(config, "tie_word_embeddings", False) for config in (hf_config, text)):
        return hf_config
    pairs = _kind(model_config, hf_config).tied_pairs(hf_config, checkpoint_names(model_config))
    if all(stored_equal(model_config, one, other, dtype) for one, other in pairs):
        return hf_config
    untied = copy.deepcopy(hf_config)
    untied.tie_word_embeddings = untied.get_text_config().tie_word_embeddings = False
    return untied


def architecture(hf_config: Any) -> str:
    """Returns the first architecture in the model's config.json; '' if there is none."""
    return (getattr(hf_config, "architectures", None) or [""])[0]


def backend_of(model_config: ModelConfig, hf_config: Any) -> str:
    """Returns `native` or `transformers`, as `model.backend` selects."""
    return "transformers" if _where(model_config, hf_config) == GENERIC else "native"


def _kind(model_config: ModelConfig, hf_config: Any, pooling: PoolingSpec | None = None) -> Any:
    """Returns the class of the model."""
    module, _, name = _where(model_config, hf_config, pooling).partition(":")
    return getattr(import_module(module), name)


def _where(model_config: ModelConfig, hf_config: Any, pooling: PoolingSpec | None = None) -> str:
    from swell.worker.loader import stored_backend

    return _choose(stored_backend(model_config), architecture(hf_config), pooling)


def _choose(backend: str, name: str, pooling: PoolingSpec | None) -> str:
    if pooling is not None:
        if backend == "transformers":
            raise ValueError(
                f"architecture {name!r} pools only with model.backend=native; set "
                "model.backend=auto"
            )
        return POOLED[pooling.family]
    if backend == "transformers" or (backend == "auto" and name not in NATIVE):
        return GENERIC
    if name not in NATIVE:
        raise ValueError(
            f"architecture {name!r} has no native model (native: {', '.join(NATIVE)}); set "
            "model.backend=transformers, which runs any causal LM of transformers"
        )
    return NATIVE[name]
