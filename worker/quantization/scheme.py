"""A scheme of quantization: which stored tensors make one parameter, and how it is computed.

A scheme belongs to a matrix: a checkpoint declares one method, and each of its matrices is
quantized in its own way or plainly stored. The stored names say which.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from swell.configs.quantization.declaration import Declaration
from swell.worker.checkpoint.checkpoint import StoredTensor
from swell.worker.quantization.grouped_matrix import Parts

UNUSED = (".input_scale", ".input_zero_point", ".input_global_scale", ".activation_scale")
"""Suffixes of the scales of activations, which are computed unquantized here."""
KV_SCALES = (".k_scale", ".v_scale", ".kv_scale")
CACHE_SCALES = (
    *KV_SCALES,
    *(".k_zero_point", ".v_zero_point", ".q_scale", ".q_zero_point", ".prob_scale"),
    *(".output_scale", ".output_zero_point"),
)
"""Suffixes of the scales of attention and of its cache, which has other ones here
(`swell.kernels.host.cache_format`)."""


class Scheme(ABC):
    """The scheme of one method, with the values that a checkpoint declares."""

    parts: ClassVar[Mapping[str, str]]
    """Suffix of a stored tensor's name -> the suffix of the parameter to which it belongs."""

    def __init__(self, declared: Declaration) -> None:
        self.declared, self.method = declared, declared.method

    @abstractmethod
    def matrix(self, name: str, parts: Parts) -> StoredTensor:
        """Returns the parameter that several stored tensors make."""

    def split(self, name: str) -> tuple[str, str]:
        """Returns the parameter to which a stored tensor belongs, and the tensor's suffix; '' if
        the tensor is a parameter by itself."""
        for suffix, of_parameter in self.parts.items():
            if name.endswith(suffix):
                return name.removesuffix(suffix) + of_parameter, suffix
        return name, ""
