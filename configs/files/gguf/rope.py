"""The rotary embedding of a file, as the `rope_parameters` of transformers."""

from __future__ import annotations

import math
from typing import Any

from swell.configs.files.gguf.header import GgufError, shown
from swell.configs.files.gguf.metadata import Metadata

LLAMA_3 = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS = (LLAMA_3, LONG, SHORT)
"""The tensors that are not weights, but factors of the rotary embedding."""
ATTENTION_FACTOR = "rope.scaling.attn_factor"

_LOW, _HIGH, _OLD_POSITIONS = 1.0, 4.0, 8192
"""The parameters of all published models with LLAMA_3. A file has only the factors that follow from
them."""
_TOLERANCE = 1e-3


def rope_parameters(metadata: Metadata, head_dim: int) -> dict[str, Any]:
    """Returns the parameters. Raises GgufError for a scaling that is not supported."""
    theta = metadata.number("rope.freq_base", 10000.0)
    tensors = metadata.file.tensors
    if LLAMA_3 in tensors:
        return _llama_3(metadata.floats(LLAMA_3), theta, head_dim, metadata)
    if LONG in tensors and SHORT in tensors:
        return _longrope(metadata, theta)
    metadata.refuse_unless(ATTENTION_FACTOR, 1.0)
    factor = _factor(metadata)
    kind = metadata.text("rope.scaling.type", "linear" if factor != 1 else "none")
    if kind == "none" or factor == 1:
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": metadata.integer(
                "rope.scaling.original_context_length"
            ),
        }
    raise GgufError(
        f"{metadata.file.path}: {metadata.architecture}.rope.scaling.type={shown(kind)} is not "
        "supported (supported are none, linear, yarn); serve the folder from which the file was "
        "made"
    )


def _factor(metadata: Metadata) -> float:
    """Returns by how much positions are divided. Files of 2023 have another key for it."""
    key = "rope.scaling.factor"
    return metadata.number(key if metadata.has(key) else "rope.scale_linear", 1.0)


def _longrope(metadata: Metadata, theta: float) -> dict[str, Any]:
    original = metadata.integer("rope.scaling.original_context_length")
    positions = metadata.integer("context_length")
    found: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": metadata.floats(SHORT),
        "long_factor": metadata.floats(LONG),
        "original_max_position_embeddings": original,
        "factor": positions / original,
    }
    if metadata.has(ATTENTION_FACTOR):
        found["attention_factor"] = metadata.number(ATTENTION_FACTOR)
    return found


def _llama_3(
    factors: list[float], theta: float, head_dim: int, metadata: Metadata
) -> dict[str, Any]:
    """Returns the parameters from which the factors follow: that of the lowest frequency is the
    largest one. Raises GgufError if they follow from other ones."""
    found = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factors[-1],
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _OLD_POSITIONS,
    }
    expected = (_llama_3_factor(pair, theta, head_dim, factors[-1]) for pair in range(len(factors)))
    if len(factors) != head_dim // 2 or any(
        abs(one - other) > _TOLERANCE * other for one, other in zip(factors, expected, strict=True)
    ):
        raise GgufError(
            f"{metadata.file.path}: the factors in {LLAMA_3} are not those of Llama 3's rotary "
            f"embedding (low_freq_factor={_LOW}, high_freq_factor={_HIGH}, "
            f"original_max_position_embeddings={_OLD_POSITIONS}); serve the folder from which the "
            "file was made"
        )
    return found


def _llama_3_factor(pair: int, theta: float, head_dim: int, factor: float) -> float:
    """Returns by how much the frequency of a pair of dimensions is divided."""
    wavelength = 2 * math.pi * math.pow(theta, 2 * pair / head_dim)
    if wavelength < _OLD_POSITIONS / _HIGH:
        return 1.0
    if wavelength > _OLD_POSITIONS / _LOW:
        return factor
    smooth = (_OLD_POSITIONS / wavelength - _LOW) / (_HIGH - _LOW)
    return 1 / ((1 - smooth) / factor + smooth)
