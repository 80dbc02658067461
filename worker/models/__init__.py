"""The models that a worker can run: a table from architecture to class, imported on first use.

A model object is one tensor rank's part of one stage. It has

    forward(batch, intermediate) -> hidden [T, hidden] on the last stage, otherwise
        IntermediateTensors
    compute_logits(hidden [S, hidden]) -> [S, vocab] float32, on every tensor rank
    argmax(hidden [S, hidden]) -> ([S] int64, the tokens of the largest logits, and these logits,
        [S] float32; see `swell.kernels.sample.greedy_sample`), on every tensor rank
    vocab_size: the number of tokens
    attention_layers() -> the attention layers of the stage; each one needs a KV cache
    make_empty_intermediate(tokens) -> buffers for the activations of the previous stage
    weight_shards(stored) -> the shards to read from a checkpoint that has the tensors named
        `stored`
    tied_pairs(hf_config, stored) -> pairs of names in `stored` that its config ties

A model that pools (`swell.worker.pool`) has instead of `compute_logits`, `argmax` and `tied_pairs`:

    hidden: the size of a hidden state
    classifier: maps pooled hidden states [P, hidden] to scores [P, classes], if the model
        classifies
    segment_starts: slot -> position of the second text, if the model has segment embeddings

A model whose experts engines can share also has

    moe_layers() -> the layers of the stage that have experts; every worker of the stage must
        compute each of them in every step
    expert_weight_shards(expert, weights) -> the shards to read for one expert; `weights`: index of
        a layer among `moe_layers` -> the expert's weights there
"""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

import torch
from torch import nn

from swell.configs.pooling import DECODERS, PoolingSpec
from swell.configs.schema import ModelConfig
from swell.worker.comm.mesh import Mesh

NATIVE = {
    "LlamaForCausalLM": "swell.worker.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "swell.worker.models.llama:LlamaForCausalLM",
    "Qwen2ForCausalLM": "swell.worker.models.llama:LlamaForCausalLM",
    "Qwen3ForCausalLM": "swell.worker.models.llama:LlamaForCausalLM",
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

GENERIC = "swell.worker.models.generic:GenericForCausalLM"


def build_model(
    model_config: ModelConfig,
    hf_config: Any,
    mesh: Mesh,
    device: torch.device | str,
    dtype: torch.dtype,
    pooling: PoolingSpec | None = None,
) -> nn.Module:
    """Builds the part of the model that this worker runs, on `device`, without loading its weights.
    With `pooling`, builds a model that pools.

    `hf_config` comes from `load_config`. Raises `ValueError` for an architecture or a parallel
    layout that is not supported, or if engines should share experts but the model lacks them.
    """
    from swell.worker.loader import max_model_len

    length = max_model_len(model_config, hf_config)
    kind = _kind(model_config, hf_config, pooling)
    if mesh.shares_experts and not hasattr(kind, "moe_layers"):
        raise ValueError(
            f"parallel.expert=true: {architecture(hf_config)!r} has no experts that engines could "
            f"share with model.backend={model_config.backend}; set parallel.expert=false"
        )
    if pooling is None:
        hf_config = resolve_ties(model_config, hf_config, dtype)
    elif pooling.token_ids is not None:
        hf_config = copy.copy(hf_config)
        hf_config.classifier_token_ids = pooling.token_ids
    model: nn.Module = kind(hf_config, mesh, torch.device(device), dtype, length)
    return model.eval()


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
                f"architecture {name!r} pools with model.backend=native alone; set it to auto"
            )
        return POOLED[pooling.family]
    if backend == "transformers" or (backend == "auto" and name not in NATIVE):
        return GENERIC
    if name not in NATIVE:
        raise ValueError(
            f"architecture {name!r} has no native model (native: {', '.join(NATIVE)}); "
            "model.backend=transformers runs any causal LM of transformers"
        )
    return NATIVE[name]
