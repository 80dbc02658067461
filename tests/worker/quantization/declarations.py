"""Declarations of quantization that are refused, and those of a quantized KV cache."""

from __future__ import annotations

from typing import Any, NamedTuple

METHODS: list[tuple[str, dict[str, Any], str]] = [
    (
        "quantization_config",
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        "bitsandby",
    ),
    ("quantization_config", {"quant_method": "quanto", "weights": "int8"}, "quanto"),
    ("quantization_config", {"quant_method": "hqq", "quant_config": {}}, "hqq"),
    ("quantization_config", {"quant_method": "aqlm", "in_group_size": 8}, "aqlm"),
    ("quantization_config", {"quant_method": "eetq", "weights": "int8"}, "eetq"),
    ("quantization_config", {"quant_method": "torchao", "quant_type": {}}, "torchao"),
    ("quantization_config", {"quant_method": "auto-round", "bits": 4}, "auto-round"),
    ("quant_config", {"quant_method": "exl2", "bits": 4.65}, "exl2"),
    ("quantization", {"bits": 4, "group_size": 64}, "4 bits"),
]
"""Key of config.json, its value, and the method as errors describe it."""

VALUES: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version='gemv'"),
    ({"quant_method": "awq", "bits": 8, "version": "gemm"}, "bits=8"),
    ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point=False"),
    ({"quant_method": "gptq", "bits": 5}, "bits=5"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
    ({"quant_method": "gptq", "bits": 4, "format": "bitblas"}, "format='bitblas'"),
    ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format=True"),
    ({"quant_method": "awq", "bits": 4, "format": "gemv_fast"}, "format='gemv_fast'"),
    (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"actorder": "columns"}}},
        },
        "actorder='columns'",
    ),
    ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "'marlin-24'"),
    (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"format": "mxfp6-pack-quantized"}},
        },
        "'mxfp6-pack-quantized'",
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "sparsity_config": {"format": "sparse-24-bitmask"},
        },
        "'sparse-24-bitmask'",
    ),
    ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "'W4A16_AWQ'"),
    (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "a": {"quant_algo": "FP8"},
                "model.b": {"quant_algo": "NVFP4_AWQ"},
            },
        },
        "'NVFP4_AWQ'",
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "transform_config": {
                "config_groups": {
                    "R1": {"apply": [{"location": "weight_output"}]},
                    "R4": {"apply": [{"location": "weight_input"}, {"location": "input"}]},
                }
            },
        },
        "location='input' of R4",
    ),
    ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype='fp4'"),
    ({"quant_method": "gptq", "bits": [4]}, "bits=[4]"),
    ({"quant_method": "gptq", "bits": 4, "group_size": "all"}, "group_size='all'"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size=[128]"),
    ({"quant_method": "compressed-tensors", "config_groups": [4]}, "config_groups=[4]"),
    (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"targets": ["re:("]}},
        },
        "targets=['re:(']",
    ),
]
"""Value of `quantization_config`, and the part of it that is not supported, as errors show it."""

FILES: list[tuple[str, dict[str, Any], str]] = [
    ("quantize_config.json", {"bits": 5, "group_size": 128}, "gptq"),
    ("quant_config.json", {"w_bit": 3, "q_group_size": 128}, "awq"),
    ("hf_quant_config.json", {"quantization": {"quant_algo": "W4A8_AWQ"}}, "W4A8_AWQ"),
    ("quanto_qmap.json", {"lm_head": {"weights": "qint8"}}, "quanto"),
]
"""File next to config.json, its content, and a part of it that errors show."""


class Cache(NamedTuple):
    """A published layout of the scales of a KV cache."""

    config: dict[str, Any]
    """The value of `quantization_config`; {}: there is none."""
    file: dict[str, Any]
    """The content of `hf_quant_config.json`; {}: there is none."""
    form: str
    """The format of one matrix; "": all matrices are floats."""
    scales: dict[str, tuple[int, ...]]
    """Name of a tensor within an attention layer of 4 heads and 2 KV heads -> its shape."""
    noted: str
    """How the log names what the checkpoint says about the cache."""


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
_ONLY_CACHE = {"quant_method": "compressed-tensors", "config_groups": {}, "format": "dense"}
_MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
_OF_LAYERS = {"k_scale": (1,), "v_scale": (1,)}
_OF_PROJECTIONS = {"k_proj.k_scale": (1,), "v_proj.v_scale": (1,)}
_OUTPUTS = {"k_proj.output_scale": (1,), "v_proj.output_scale": (1,)}
_FIRST = "model.layers.0.self_attn."

CACHES: dict[str, Cache] = {
    "compressed-tensors": Cache(
        {"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME},
        {},
        "ct-fp8-channel",
        _OF_LAYERS,
        'kv_cache_scheme={"num_bits": 8, "type": "float"',
    ),
    "compressed-tensors, only the cache": Cache(
        {**_ONLY_CACHE, "kv_cache_scheme": SCHEME}, {}, "", _OF_LAYERS, "kv_cache_scheme={"
    ),
    "compressed-tensors, each head": Cache(
        {**_ONLY_CACHE, "kv_cache_scheme": {**SCHEME, "strategy": "attn_head"}},
        {},
        "",
        {"q_scale": (4, 1, 1), "k_scale": (2, 1, 1), "v_scale": (2, 1, 1)},
        "kv_cache_scheme={",
    ),
    "compressed-tensors, zeros": Cache(
        {**_ONLY_CACHE, "kv_cache_scheme": {**SCHEME, "type": "int", "symmetric": False}},
        {},
        "",
        {**_OF_LAYERS, "k_zero_point": (1,), "v_zero_point": (1,)},
        "kv_cache_scheme={",
    ),
    "outputs of projections": Cache(
        {**_ONLY_CACHE, "kv_cache_scheme": SCHEME},
        {},
        "",
        {**_OUTPUTS, "k_proj.output_zero_point": (1,), "v_proj.output_zero_point": (1,)},
        "kv_cache_scheme={",
    ),
    "AutoFP8": Cache(
        {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"},
        {},
        "fp8-tensor",
        {"kv_scale": ()},
        'kv_cache_scheme="static"',
    ),
    "vLLM": Cache(
        {"quant_method": "fp8"},
        {},
        "fp8-tensor",
        {f"attn.{name}_scale": () for name in ("q", "k", "v", "prob")},
        f"{_FIRST}attn.k_scale",
    ),
    "GPTQ": Cache(
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True},
        {},
        "gptq",
        _OF_LAYERS,
        f"{_FIRST}k_scale",
    ),
    "ModelOpt": Cache(
        {**_MODELOPT, "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
        {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
        "modelopt-fp8",
        _OF_PROJECTIONS,
        "kv_cache_scheme={",
    ),
    "ModelOpt, fused": Cache(
        {**_MODELOPT, "kv_cache_quant_algo": "FP8"},
        {},
        "modelopt-fp8",
        {"qkv_proj.k_scale": (1,), "qkv_proj.v_scale": (1,)},
        'kv_cache_quant_algo="FP8"',
    ),
    "ModelOpt, a file": Cache(
        {},
        {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
        "modelopt-fp8",
        _OF_PROJECTIONS,
        'kv_cache_quant_algo="FP8"',
    ),
    "ModelOpt, only the cache": Cache(
        {},
        {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}},
        "",
        _OF_PROJECTIONS,
        'kv_cache_quant_algo="FP8"',
    ),
    "ModelOpt, no scales": Cache(
        _MODELOPT,
        {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}},
        "modelopt-fp8",
        {},
        'kv_cache_quant_algo="NVFP4"',
    ),
    "not declared": Cache({}, {}, "", _OF_LAYERS, f"{_FIRST}k_scale"),
}
"""Layouts that llm-compressor, AutoFP8, vLLM and ModelOpt write."""
