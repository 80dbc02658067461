"""A scheme of quantization: which stored tensors make one parameter, and how it is computed.

A scheme belongs to a matrix: a checkpoint declares one method, and each of its matrices is
quantized in its own way or plainly stored. The stored names say which.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from swell.worker.checkpoint.checkpoint import StoredTensor
from swell.worker.quantization.grouped_matrix import Parts

UNUSED = (".input_scale", ".input_zero_point", ".input_global_scale", ".activation_scale")
"""Suffixes of the scales of activations, which are computed unquantized here."""
CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_scale", ".output_scale")
"""Suffixes of the scales of attention and of its cache, which are not quantized here."""


class Scheme(ABC):
    """The scheme of one method, with the values that a checkpoint declares."""

    parts: ClassVar[Mapping[str, str]]
    """Suffix of a stored tensor's name -> the suffix of the parameter to which it belongs."""

    def __init__(self, method: str, config: Mapping[str, Any]) -> None:
        """`config`: what the checkpoint declares. Raises `ValueError` with the value that is not
        supported."""
        self.method = method

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


def refuse_values(config: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises `ValueError` for a key with a value that is not allowed. A missing key is allowed;
    strings are compared without case."""
    for key, values in allowed.items():
        value = config.get(key)
        plain = value.lower() if isinstance(value, str) else value
        if plain is not None and plain not in values:
            known = ", ".join(str(each) for each in values)
            raise ValueError(f"{key}={value!r} (supported: {known})")


def integer(config: Mapping[str, Any], key: str) -> int | None:
    """Returns the integer of a key; None if it is missing or null. Raises `ValueError`."""
    value = config.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise ValueError(f"{key}={value!r} (an integer is expected)")
    return value


def block_size(config: Mapping[str, Any], key: str) -> tuple[int, int] | None:
    """Returns the rows and columns of a block; None if the key is missing or null. Raises
    `ValueError`."""
    value = config.get(key)
    parts = value.split("x") if isinstance(value, str) else value
    if parts is None:
        return None
    try:
        rows, columns = (int(part) for part in parts)
    except (TypeError, ValueError):
        rows = columns = 0
    if min(rows, columns) < 1:
        raise ValueError(f"{key}={value!r} (two sizes are expected)")
    return rows, columns


def mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns the object of a key; an empty one if it is missing or null. Raises `ValueError`."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{key}={value!r} (an object is expected)")
    return value or {}
