"""The config of any causal architecture of transformers, shrunk so that its mechanisms remain.

Sizes are found by the names of a config's keys. Windows and chunks are shorter than the prompts,
and every kind of layer that a model has by default is among the few that remain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from swell.worker.models.text_part import text_architecture
from tests.zoo.exceptions import BESIDE, CHANGES, PARTS, WHOLE

LAYERS = 4
VOCAB = 320
POSITIONS = 128
WINDOW = 8

SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim"), 64),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "attention_head_dim", "attention_head_size"), 16),
    **dict.fromkeys(("kv_channels", "swa_head_dim", "global_head_dim", "d_head"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 96),
    **dict.fromkeys(("ffn_hidden_size", "dff", "dim_ff", "d_inner", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("dense_intermediate_size", "feed_forward_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("shared_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("moe_num_experts",), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "word_embed_proj_dim": 64,
    "index_topk": 4,
    "index_head_dim": 16,
    "index_n_heads": 4,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), POSITIONS),
    **dict.fromkeys(("max_seq_len", "seq_length", "max_target_positions"), POSITIONS),
    **dict.fromkeys(("model_max_length", "context_length"), POSITIONS),
    "num_kv_shared_layers": 2,
    "rotary_dim": 8,
    "encoder_hash_byte_group_vocab": 500,
}
"""Key -> its value, if the default is a larger number."""

WINDOWS = (
    "sliding_window",
    "sliding_window_size",
    "attention_chunk_size",
    "attention_window_size",
    "local_attention",
    "window_size",
)
KV_HEADS = {
    # key -> the key of the query heads
    "num_key_value_heads": "num_attention_heads",
    "num_kv_heads": "num_attention_heads",
    "swa_num_key_value_heads": "swa_num_attention_heads",
}
DERIVED = {"transformers_version", "model_type", "architectures", "per_layer_config", "qk_head_dim"}
"""Keys that are not copied: the class derives them again."""
RUN_ALL_PARTS = {"blt", "pi0"}
"""Model types whose parts are all run."""
DEPTHS = ("num_hidden_layers", "num_layers", "depth", "num_blocks", "encoder_layers")
FIXED = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True}


def kinds() -> list[str]:
    """Returns every model type that has a causal language model, or that wraps one."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})


def architecture(kind: str) -> str:
    """Returns the class that transformers builds for a model type."""
    wrapper = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind)
    name = wrapper or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    return name if isinstance(name, str) else name[0]


def text_architecture_of(kind: str) -> str:
    """Returns the class that computes tokens: that of the text model in a wrapper, if there is
    one."""
    return text_architecture(default_of(kind)) or architecture(kind)


def variants(kind: str) -> list[str]:
    """Returns the changes to the defaults that need a model of their own."""
    values = default_of(kind).get_text_config(decoder=True).to_dict()
    found = [""]
    if any(k in values and not values[k] for k in WINDOWS) or "use_sliding_window" in values:
        found.append("window")
    return found


def shrunk(kind: str, variant: str = "") -> Any:
    """Returns a config of the model type `kind` with a few small layers."""
    whole = CONFIG_MAPPING[kind]
    default = default_of(kind)
    text = default.get_text_config(decoder=True)
    key = next((k for k in default.sub_configs if getattr(default, k, None) is text), None)
    source = default if key is None else text
    values = shrink(source.to_dict(), getattr(text, "num_hidden_layers", 0), kind)
    values.update(CHANGES.get(kind, {}))
    if variant == "window":
        values.update(_windowed(values))
    if key is None:
        return whole(**values)
    parts = {k: _one_layer(getattr(default, k, None)) for k in default.sub_configs}
    beside = PARTS.get(kind, {})
    parts = {k: {**part, **beside.get(k, {})} for k, part in parts.items() if part is not None}
    own = BESIDE.get(kind, {})
    return whole(**{**own, **parts, key: {**values, "model_type": text.model_type}})


def _one_layer(part: Any) -> dict[str, Any] | None:
    """Returns the config of a vision or audio tower, which is never run."""
    return None if part is None else _shallow(part.to_dict())


def _shallow(values: Mapping[str, Any]) -> dict[str, Any]:
    kept = {k: v for k, v in values.items() if k not in DERIVED - {"model_type"}}
    depths = {k: kept[k] for k in DEPTHS if isinstance(kept.get(k), int)}
    for key, value in kept.items():
        if isinstance(value, list) and len(value) in depths.values():
            kept[key] = value[:1]
    return {**kept, **dict.fromkeys(depths, 1)}


def default_of(kind: str) -> Any:
    """Returns the default config, with the changes of `exceptions` if it is not valid by itself."""
    try:
        return CONFIG_MAPPING[kind]()
    except Exception:
        return CONFIG_MAPPING[kind](**WHOLE[kind])


def shrink(values: Mapping[str, Any], layers: int, kind: str = "") -> dict[str, Any]:
    """Returns the keys of a config with smaller values. `layers`: the number of layers of the
    original config."""
    small = {k: v for k, v in values.items() if k not in DERIVED}
    for key, value in list(small.items()):
        if key in KV_HEADS and isinstance(value, int):
            heads = values.get(KV_HEADS[key])
            small[key] = 4 if value == heads else min(value, 2)
        elif key in SIZES and isinstance(value, int) and not isinstance(value, bool):
            small[key] = min(value, SIZES[key])
        elif key in WINDOWS and isinstance(value, int) and value > WINDOW:
            small[key] = WINDOW
        elif key in FIXED:
            small[key] = FIXED[key]
        elif isinstance(value, list) and len(value) == layers > LAYERS:
            small[key] = few(value)
        elif isinstance(value, dict) and "model_type" in value:
            small[key] = shrink(value, 0) if kind in RUN_ALL_PARTS else _shallow(value)
    if isinstance(values.get("qk_rope_head_dim"), int) and "head_dim" in values:
        small["head_dim"] = small["qk_rope_head_dim"]  # the rotated size, in latent attention
    return small


def few(values: list[Any]) -> list[Any]:
    """Returns every value that occurs, in the order of first use, repeated to the number of layers.

    [a, a, a, b, a, a, a, b] -> [a, b, a, b]
    """
    seen: list[Any] = []
    for value in values:
        if value not in seen:
            seen.append(value)
    return [seen[i % len(seen)] for i in range(LAYERS)]


def _windowed(values: Mapping[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = {k: WINDOW for k in WINDOWS if k in values and not values[k]}
    if "use_sliding_window" in values:
        changed.update(use_sliding_window=True, sliding_window=WINDOW, layer_types=None)
        if "max_window_layers" in values:
            changed["max_window_layers"] = LAYERS // 2
    return changed
