"""Turns the metadata of each supported architecture into the `config.json` of transformers,
including what a file omits because llama.cpp knows it by the architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swell.configs.files.gguf.header import GgufError, GgufFile, shown
from swell.configs.files.gguf.metadata import Metadata
from swell.configs.files.gguf.rope import rope_parameters
from swell.configs.files.gguf.tokenizer import Vocabulary, end_token_ids, token_id

_OUTPUT = "output.weight"
_EMBEDDING = "token_embd.weight"
_UNQUANTIZED = {"F32": "float32", "F16": "float16"}


def architecture_of(file: GgufFile) -> str:
    """Returns the architecture. Raises GgufError for one that is not supported."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise GgufError(
            f"{file.path}: the architecture {shown(name)} is not supported in a GGUF file "
            f"(supported are {', '.join(ARCHITECTURES)}); serve the folder from which the file was "
            "made"
        )
    return name


def model_config(file: GgufFile, vocabulary: Vocabulary) -> dict[str, Any]:
    """Returns the `config.json`. Raises GgufError."""
    architecture = architecture_of(file)
    metadata = Metadata(file, architecture)
    embedding = file.tensors.get(_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise GgufError(
            f"{file.path} has no tensor {_EMBEDDING!r}; it does not contain a whole model"
        )
    ends = end_token_ids(file, vocabulary)
    config: dict[str, Any] = {
        "vocab_size": embedding.shape[0],
        "hidden_size": metadata.integer("embedding_length"),
        "num_hidden_layers": _layers(metadata),
        "num_attention_heads": metadata.integer("attention.head_count"),
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": _OUTPUT not in file.tensors,
        "bos_token_id": token_id(file, vocabulary, "bos"),
        "eos_token_id": ends or None,
        "pad_token_id": token_id(file, vocabulary, "padding"),
        "dtype": _dtype(file, architecture),
    }
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = metadata.integer("attention.head_count_kv", heads)
    config["head_dim"] = metadata.integer("attention.key_length", config["hidden_size"] // heads)
    if (values := metadata.integer("attention.value_length", config["head_dim"])) != config[
        "head_dim"
    ]:
        raise GgufError(
            f"{file.path}: the value heads have {values} dimensions and the key heads "
            f"{config['head_dim']}; different sizes are not supported"
        )
    metadata.refuse_unless("attention.causal", True)
    rotated = metadata.integer("rope.dimension_count", config["head_dim"])
    metadata.refuse_unless("rope.dimension_count_swa", rotated)
    return {**config, **ARCHITECTURES[architecture](metadata, config)}


def _layers(metadata: Metadata) -> int:
    """Returns the number of layers. Raises GgufError unless the tensors are those of as many."""
    stated, file = metadata.integer("block_count"), metadata.file
    found = {name.split(".", 2)[1] for name in file.tensors if name.startswith("blk.")}
    if stated != len(found):
        raise GgufError(
            f"{file.path} is damaged: {metadata.architecture}.block_count={stated}, and its "
            f"tensors are those of {len(found)} layers; copy it there again"
        )
    if found != {str(layer) for layer in range(stated)}:
        raise GgufError(
            f"{file.path} is damaged: its layers are not numbered from 0 to {stated - 1}; copy it "
            "there again"
        )
    return stated


def _dtype(file: GgufFile, architecture: str) -> str:
    """Returns the type in which the model is served if `model.dtype` is `auto`: the one of its
    matrices, and bfloat16 if they are quantized. The activations of Gemma exceed the range of
    float16, so its float16 matrices are served in bfloat16."""
    names = {"F32": "float32"} if architecture.startswith("gemma") else _UNQUANTIZED
    kinds = {tensor.type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return names.get(next(iter(kinds)), "bfloat16") if len(kinds) == 1 else "bfloat16"


def _dense(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "intermediate_size": metadata.integer("feed_forward_length"),
        "hidden_act": "silu",
        "rope_parameters": _rope(metadata, config),
    }


def _rope(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the rotary embedding of an architecture that rotates whole heads."""
    rotated = metadata.integer("rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        raise GgufError(
            f"{metadata.file.path}: {metadata.architecture}.rope.dimension_count={rotated} is not "
            f"the size of a head, {config['head_dim']}, which is not supported"
        )
    return rope_parameters(metadata, config["head_dim"])


def _llama(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    if metadata.has("expert_count") and metadata.file.metadata["llama.expert_count"]:
        raise GgufError(
            f"{metadata.file.path}: the architecture 'llama' with experts (Mixtral) is not "
            "supported in a GGUF file; serve the folder from which the file was made"
        )
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": "blk.0.attn_q.bias" in metadata.file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in metadata.file.tensors,
        **_dense(metadata, config),
    }


def _qwen2(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": False,
        **_dense(metadata, config),
    }


def _qwen3(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "use_sliding_window": False,
        **_dense(metadata, config),
    }


def _qwen3moe(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "use_sliding_window": False,
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        **_dense(metadata, config),
    }


def _phi3(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    rotated = metadata.integer("rope.dimension_count", config["head_dim"])
    rope = rope_parameters(metadata, rotated)
    rope["partial_rotary_factor"] = rotated / config["head_dim"]
    original = metadata.integer(
        "rope.scaling.original_context_length", config["max_position_embeddings"]
    )
    window = metadata.file.metadata.get("phi3.attention.sliding_window")
    return {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "intermediate_size": metadata.integer("feed_forward_length"),
        "hidden_act": "silu",
        "rope_parameters": rope,
        "original_max_position_embeddings": original,
        "sliding_window": metadata.integer("attention.sliding_window") if window else None,
    }


def _gemma(metadata: Metadata, config: dict[str, Any], layers_of_largest: int) -> dict[str, Any]:
    """Returns what Gemma 2 and 3 have in common. The largest model of each scales its queries by
    the hidden size of a head, and the others by the head's dimensions."""
    is_largest = config["num_hidden_layers"] == layers_of_largest
    per_head = config["hidden_size"] // config["num_attention_heads"]
    return {
        "intermediate_size": metadata.integer("feed_forward_length"),
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": per_head if is_largest else config["head_dim"],
        "sliding_window": metadata.integer("attention.sliding_window"),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


def _windows(metadata: Metadata, layers: int, period: int) -> list[str]:
    """Returns the kinds of attention: the last layer of each period reads the whole sequence.
    `period`: the one of the architecture, which a file rarely states."""
    period = metadata.integer("attention.sliding_window_pattern", period)
    return [
        "sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)
    ]


def _gemma2(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    rope = _rope(metadata, config)
    metadata.refuse_unless("rope.freq_base_swa", rope["rope_theta"])
    return {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        **_gemma(metadata, config, layers_of_largest=46),
        "layer_types": _windows(metadata, config["num_hidden_layers"], 2),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
        "rope_parameters": rope,
    }


def _gemma3(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    local = metadata.number("rope.freq_base_swa", 10000.0)
    cap = metadata.file.metadata.get("gemma3.final_logit_softcapping")
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        **_gemma(metadata, config, layers_of_largest=62),
        "layer_types": _windows(metadata, config["num_hidden_layers"], 6),
        "final_logit_softcapping": metadata.number("final_logit_softcapping") if cap else None,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
            "full_attention": _rope(metadata, config),
        },
    }


ARCHITECTURES: dict[str, Callable[[Metadata, dict[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
"""Name of an architecture -> what its config adds to that of all architectures. Mistral's is
`llama`."""
