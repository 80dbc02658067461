"""Small random models of many families, saved as folders, which the model tests compare against.

Weights are larger than a fresh model's, so that attention is not uniform, layers matter, and greedy
answers differ from prompt to prompt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
WINDOW = 8
"""The window in tokens: shorter than the tests' prompts."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # name -> (model type, differences from SIZES)
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "head_dim": 48}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True, "vocab_size": 321}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": None}),
    "starcoder2": ("starcoder2", {"sliding_window": WINDOW}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "gemma2": (
        "gemma2",
        {"head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 32},
    ),
    "gemma2-caps": (
        "gemma2",
        {
            "head_dim": 32,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {}),
    "phi3-partial": (
        "phi3",
        {
            "sliding_window": WINDOW,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    "phi3-longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0 + 0.1 * i for i in range(12)],
                "long_factor": [2.0 + 0.1 * i for i in range(12)],
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "stablelm": ("stablelm", {}),
    "gpt2": (
        "gpt2",
        {"n_embd": 128, "n_head": 4, "n_layer": 4, "n_positions": 256, "n_inner": 192},
    ),
    "opt": ("opt", {"ffn_dim": 192, "word_embed_proj_dim": 128}),
    "cohere": ("cohere", {"logit_scale": 0.5}),
    "granite": (
        "granite",
        {"attention_multiplier": 0.18, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 32,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "head_dim": 32,
        },
    ),
    "qwen3_moe-mixed": (
        "qwen3_moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "head_dim": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "decoder_sparse_step": 2,
            "attention_bias": True,
        },
    ),
    "exaone4": (
        "exaone4",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "phimoe": (
        "phimoe",
        {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "roberta": ("roberta", {"is_decoder": True}),
    "bert": ("bert", {}),
    "doge": ("doge", {}),
    "gpt_oss": ("gpt_oss", {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "diffllama": ("diffllama", {}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    "xglm": ("xglm", {"attention_heads": 4, "num_layers": 2, "ffn_dim": 192}),
    "apertus": ("apertus", {}),
    "gemma4": (
        "gemma4_text",
        {
            "head_dim": 32,
            "sliding_window": WINDOW,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gemma3n": (
        "gemma3n_text",
        {
            "head_dim": 32,
            "sliding_window": WINDOW,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB,
            "intermediate_size": [192] * 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
        },
    ),
    "mpt": ("mpt", {"d_model": 128, "n_heads": 4, "n_layers": 2}),
    "cpmant": ("cpmant", {}),
    "musicgen": ("musicgen", {}),
    "mamba": ("mamba", {"state_size": 8}),
    "falcon": ("falcon", {"alibi": True}),
    "bloom": ("bloom", {"n_head": 4, "n_layer": 2}),
    "t5": ("t5", {}),
}


def config_of(family: str) -> Any:
    """Returns the config of a family: its differences, and the defaults of its class for all
    else."""
    kind, differs = FAMILIES[family]
    return transformers.AutoConfig.for_model(kind, **differs)


def change_config(folder: Path, **values: Any) -> None:
    """Writes keys into a folder's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def make(folder: Path, family: str, seed: int = 0, **changes: Any) -> Any:
    """Saves a random float32 model of `family` into `folder`; returns transformers' model.

    `changes` are keys of its config.
    """
    kind, differs = FAMILIES[family]
    values = {**SIZES, **differs, **changes}
    values = {key: value for key, value in values.items() if value is not None}
    config = transformers.AutoConfig.for_model(kind, **values)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        kinds = transformers.AutoModelForCausalLM
        if getattr(config, "is_encoder_decoder", False):
            kinds = transformers.AutoModelForSeq2SeqLM
        model = kinds.from_config(config, dtype=torch.float32).eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.2)
            elif parameter.dim() == 1 and "norm" in name:
                parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model
