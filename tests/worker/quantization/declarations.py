"""Declarations of quantization that are refused."""

from __future__ import annotations

from typing import Any

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
