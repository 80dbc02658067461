"""The models that a worker can run: a table from architecture to class, imported on use.

Every model is one stage and one tensor rank's part, and offers

    forward(batch, intermediate) -> hidden [T, hidden] of the last stage, else IntermediateTensors
    compute_logits(hidden [S, hidden]) -> [S, vocab] float32, on every tensor rank
    most_likely(hidden [S, hidden]) -> ([S] int64, where the largest logits are, and these, [S]
        float32, as `swell.kernels.sample.greedy_tokens` says), on every tensor rank
    vocab_size: how many tokens there are
    attention_layers() -> the attention layers of the stage, each of which wants a KV cache
    make_empty_intermediate(tokens) -> room for what the stage before sends
    pieces(stored) -> what it reads from a checkpoint that has the tensors named `stored`

and, if engines can share its experts,

    moe_layers() -> the layers of the stage that have experts; every worker of the stage must
        compute each of them in every step
    expert_pieces(expert, weights) -> what it reads for one expert, with weights one a layer
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

from swell.configs.schema import ModelConfig
from swell.worker.mesh import Mesh

NATIVE = {
    "LlamaForCausalLM": "swell.worker.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "swell.worker.models.llama:LlamaForCausalLM",
    "Qwen2ForCausalLM": "swell.worker.models.llama:LlamaForCausalLM",
    "Qwen3ForCausalLM": "swell.worker.models.llama:LlamaForCausalLM",
    "MixtralForCausalLM": "swell.worker.models.moe:MoeForCausalLM",
    "Qwen3MoeForCausalLM": "swell.worker.models.moe:MoeForCausalLM",
}
"""Architecture, as config.json names it -> "module:Class"."""

GENERIC = "swell.worker.models.generic:GenericForCausalLM"


def build_model(
    model_config: ModelConfig,
    hf_config: Any,
    mesh: Mesh,
    device: torch.device | str,
    dtype: torch.dtype,
) -> nn.Module:
    """The part of the model that this worker runs, on `device`, its weights not yet loaded.

    `hf_config` comes from `load_config`. Raises `ValueError` for an architecture or a split that
    is not supported, or if engines are to share experts of a model that has none.
    """
    from swell.worker.loader import max_model_len

    length = max_model_len(model_config, hf_config)
    where = _choose(model_config.backend, architecture(hf_config))
    module, _, name = where.partition(":")
    kind = getattr(import_module(module), name)
    if mesh.shares_experts and not hasattr(kind, "moe_layers"):
        raise ValueError(
            f"parallel.expert=true: {architecture(hf_config)!r} has no experts that engines could "
            f"share with model.backend={model_config.backend}; set parallel.expert=false"
        )
    model: nn.Module = kind(hf_config, mesh, torch.device(device), dtype, length)
    return model.eval()


def architecture(hf_config: Any) -> str:
    """The first architecture that the model's config.json names; '' if it names none."""
    return (getattr(hf_config, "architectures", None) or [""])[0]


def _choose(backend: str, name: str) -> str:
    if backend == "transformers" or (backend == "auto" and name not in NATIVE):
        return GENERIC
    if name not in NATIVE:
        raise ValueError(
            f"architecture {name!r} has no native model (native: {', '.join(NATIVE)}); "
            "model.backend=transformers runs any causal LM of transformers"
        )
    return NATIVE[name]
