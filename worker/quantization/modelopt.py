"""The method `modelopt` of NVIDIA's Model Optimizer: FP8 and NVFP4, also mixed in one model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swell.worker.checkpoint.checkpoint import StoredTensor
from swell.worker.quantization.fp4 import Fp4Matrix
from swell.worker.quantization.fp8 import ScaledMatrix
from swell.worker.quantization.grouped_matrix import Parts
from swell.worker.quantization.scheme import Scheme, mapping, refuse_values

ALGORITHMS = ("fp8", "fp8_per_channel_per_token", "fp8_pb_wo", "nvfp4", "mxfp8", "mixed_precision")

INPUT_FACTORS = ".pre_quant_scale"
"""Factors by which AWQ multiplies the inputs of a matrix; its weights are divided by them."""


class ModelOpt(Scheme):
    parts = dict.fromkeys((".weight_scale_2", ".weight_scale", ".weight"), ".weight")

    def __init__(self, method: str, config: Mapping[str, Any]) -> None:
        super().__init__(method, config)
        declared = mapping(config, "quantization") or config  # hf_quant_config.json has it inside
        refuse_values(declared, {"quant_algo": ALGORITHMS})
        layers = mapping(declared, "quantized_layers")
        for name in layers:
            try:
                refuse_values(mapping(layers, name), {"quant_algo": ALGORITHMS})
            except ValueError as error:
                raise ValueError(f"{error} of {name}") from None

    def split(self, name: str) -> tuple[str, str]:
        if name.endswith(INPUT_FACTORS):
            raise ValueError(
                f"tensor {name!r} has factors of activations, which are not supported; serve the "
                "checkpoint from which it was made"
            )
        return super().split(name)

    def matrix(self, name: str, parts: Parts) -> StoredTensor:
        kind = Fp4Matrix if ".weight_scale_2" in parts else ScaledMatrix
        return kind(name, self.method, parts)
