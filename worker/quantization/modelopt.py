"""The method `modelopt` of NVIDIA's Model Optimizer: FP8 and NVFP4, also mixed in one model."""

from __future__ import annotations

from swell.worker.checkpoint.checkpoint import StoredTensor
from swell.worker.quantization.fp4 import Fp4Matrix
from swell.worker.quantization.fp8 import ScaledMatrix
from swell.worker.quantization.grouped_matrix import Parts
from swell.worker.quantization.scheme import Scheme


class ModelOpt(Scheme):
    parts = dict.fromkeys((".weight_scale_2", ".weight_scale", ".weight"), ".weight")

    def matrix(self, name: str, parts: Parts) -> StoredTensor:
        kind = Fp4Matrix if ".weight_scale_2" in parts else ScaledMatrix
        return kind(name, self.method, parts)
