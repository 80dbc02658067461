"""Changes that a model type needs in addition to the rules of `configs`, so that its config is
valid."""

from __future__ import annotations

from typing import Any

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MROPE = {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}

CHANGES: dict[str, dict[str, Any]] = {
    # A norm after every sum makes all tokens alike if weights are random, so these have fewer
    # layers.
    **{kind: {"num_hidden_layers": 2} for kind in ("bert", "bert-generation", "electra", "ernie")},
    "roc_bert": {"num_hidden_layers": 2, "enable_pronunciation": False, "enable_shape": False},
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE},
    },
    "chameleon": {"vocabulary_map": {"<image>": 4, "IMGIMGAZ": 5, "IMGIMGBZ": 6}},
    "cohere_compass": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": None,
            "sliding_attention": {**ROPE, "mrope_section": [4, 2, 2]},
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 500_000},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_ocr2": {
        "num_experts_per_tok": 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "diffusion_gemma": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "dory": {
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"],
        "n_input_layers": 2,
        "n_recurrent_layers": 2,
        "n_output_layers": 0,
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker", "cosmos3_edge"), MROPE),
    **dict.fromkeys(("glm4v", "glm46v", "glmga", "glm_ocr"), MROPE),
    "qwen3_vl_moe": {"moe_intermediate_size": 48},  # else its experts are square
    "hy_v4_vl": {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}},
    "apertus1p5": {"vocab_size": 270_000},  # its sounds are tokens
    "glm5_next": {"index_topk": 16},
    "paddleocr_vl": MROPE,
    "glm4v_moe": {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}},
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [32, 16],
        "rope_parameters": {**ROPE, "mrope_section": [3, 3, 2]},
    },
    "gemma4_assistant": {"num_kv_shared_layers": 4},
    "gemma4_unified_assistant": {"num_kv_shared_layers": 4},
    "granitemoehybrid": MAMBA,
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "hunyuan_vl": {
        "head_dim": 16,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 10000.0,
            "alpha": 1000.0,
            "factor": 1.0,
            "mrope_section": [2, 2, 2, 2],
        },
    },
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2},
    "ministral": {"head_dim": 16},
    "mistral4": {
        "head_dim": 16,
        "qk_nope_head_dim": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
            "partial_rotary_factor": 0.5,
        },
    },
    "molmo2": {"additional_vocab_size": 320},  # transformers saves two tables of equal size
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"axial_pos_shape": [16, 16], "axial_pos_embds_dim": [32, 32]},
    "step3p7": {"sliding_window": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "zamba2": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_headdim": 16,
        "n_mamba_heads": 8,
        "mamba_d_state": 16,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "hybrid_layer_ids": [1, 3],
    },
}
"""Model type -> keys of its (text) config."""

WHOLE: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        },
    },
}
"""Model type whose defaults are refused by its own class -> what makes them valid."""

BESIDE: dict[str, dict[str, Any]] = {
    "emu3": {"vocabulary_map": {"<image>": 4, "<|visual token 000000|>": 5, "<|extra_200|>": 6}},
    "granite4_vision": {"downsample_rate": "4/8", "deepstack_layer_map": [[-1, 0]]},
}
"""Model type -> keys of a wrapper's own config."""

PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "aya_vision": {"vision_config": {"num_attention_heads": 16}},
    "qwen2_vl": {"vision_config": {"embed_dim": 32, "num_heads": 2, "hidden_size": 64}},
    "qwen3_vl_moe": {
        "vision_config": {
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 64,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0],
        }
    },
    "deepseek_ocr2": {
        "vision_config": {
            "sam_config": {
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "mlp_dim": 64,
                "output_channels": 16,
                "downsample_channels": [16, 32],
                "image_size": 64,
                "window_size": 2,
                "global_attn_indexes": [0],
            },
            "encoder_config": {
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "intermediate_size": 64,
                "layer_types": None,
            },
        },
    },
    "t5gemma2": {"encoder": {"text_config": {"hidden_size": 64, "vocab_size": 320}}},
    "muse_spark": {"audio_config": {"out_hidden_size": 64}},
    "granite_docling": {"vision_config": {"out_hidden_size": 64}},
    "inkling2": {"vision_config": {"text_hidden_size": 64}},
    "inkling2_loop": {"vision_config": {"text_hidden_size": 64}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [0]}},
    "dots3_note": {
        "vision_config": {"adapter_out_dim": 64},
        "audio_config": {"adapter_out_dim": 64},
    },
}
"""Model type -> keys of the configs other than the text model's."""

SAVED_AS_BUILT = ("qianfan_ocr", "shieldgemma2")
"""Model types whose weights are saved with the names of their parameters: transformers changes them
back to names that are not published, and does not read those of shieldgemma2."""
