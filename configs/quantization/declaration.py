"""Finds out how a checkpoint is quantized; refuses methods that are not supported.

A checkpoint declares it in config.json, in the config of one of its parts, or in another file of
its folder. A matrix of an undeclared quantization is refused when it is read, by its type.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swell.configs.files.bounded_files import MAX_CONFIG_BYTES, parse_json, read_file
from swell.configs.quantization.methods import METHODS, refuse_tensor

KEYS = ("quantization_config", "compression_config", "quantization", "quant_config")
"""Keys of config.json, or of the config of one of its parts."""

FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
    "quanto_qmap.json": "quanto",
    "quant_model_description.json": "modelslim",
}
"""File in the folder of config.json -> the method whose tools write it."""

_CACHE_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo")
"""Keys of compressed-tensors, AutoFP8 and ModelOpt for the KV cache."""
_METHOD_KEYS = ("quant_method", "quant_algo", "quant_type", "format")

_WAY_OUT = (
    "serve the checkpoint from which it was made, in bfloat16, float16 or float32, or a copy in "
    f"one of the formats {', '.join(METHODS)}"
)
_SHOWN_CHARS = 200


@dataclass(frozen=True)
class Declaration:
    """How a checkpoint is quantized, in a way that is supported."""

    method: str
    values: Any
    """The result of the method's function in `METHODS`."""

    def refuse_tensors(self, names: Iterable[str]) -> None:
        """Raises `ValueError` if one of the stored tensors is not supported."""
        for name in names:
            refuse_tensor(self.method, name)


def find_declaration(
    path: str, config: Mapping[str, Any], folder: Path | None
) -> Declaration | None:
    """Returns how the matrices of a model are quantized; None if it declares no quantization.

    `path`: the model's name in errors; `config`: the content of config.json; `folder`: where the
    other files are, if they are local. Raises `ValueError` for what is not supported.
    """
    of_matrices = [each for each in _in_files(folder) if _is_quantized(each[1])]
    for where, value in (*_in_config(config), *of_matrices):
        method = _method(where, value)
        read_values = METHODS.get(method)
        if read_values is None:
            raise ValueError(
                f"model {path!r} is quantized ({_named(where, value)}): {where}={_shown(value)} is "
                f"not supported; {_WAY_OUT}. If its weights are not quantized, remove {where}"
            )
        try:
            return Declaration(method, read_values(value))
        except ValueError as error:
            raise ValueError(
                f"model {path!r} is quantized ({method}), but its {where} has a value that is not "
                f"supported: {error}; {_WAY_OUT}"
            ) from None
    return None


def find_cache_declaration(config: Mapping[str, Any], folder: Path | None) -> str | None:
    """Returns what a checkpoint declares for the KV cache, as key=value; None: nothing. For the
    arguments see `find_declaration`."""
    for _, value in (*_in_config(config), *_in_files(folder)):
        for level in _levels(value):
            for key in _CACHE_KEYS:
                if level.get(key):
                    return f"{key}={_shown(level[key])}"
    return None


def _in_config(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    parts = {"": config}
    parts.update((f"{key}.", part) for key, part in config.items() if isinstance(part, Mapping))
    for prefix, part in parts.items():
        for key in KEYS:
            if value := part.get(key):
                yield prefix + key, value


def _in_files(folder: Path | None) -> Iterator[tuple[str, Any]]:
    if folder is None:
        return
    for name in FILES:
        file = folder / name
        if not file.is_file():
            continue
        try:
            value = parse_json(read_file(file, MAX_CONFIG_BYTES))
        except (OSError, ValueError):
            value = "a file that cannot be read"
        yield name, value


def _is_quantized(value: Any) -> bool:
    """Whether a file names a method. ModelOpt also writes a file with a null method for unquantized
    weights."""
    for inner in _levels(value)[1:]:
        if "quant_algo" in inner:
            return bool(inner["quant_algo"])
    return bool(value)


def _levels(value: Any) -> list[Mapping[str, Any]]:
    """Returns a declaration, and the object within that ModelOpt's file has for its values."""
    if not isinstance(value, Mapping):
        return []
    inner = value.get("quantization")
    return [value, inner] if isinstance(inner, Mapping) else [value]


def _method(where: str, value: Any) -> str:
    """Returns the method that a declaration names; '' if it names none."""
    if not isinstance(value, Mapping):
        return ""
    named = value.get("quant_method")
    if isinstance(named, str):
        return "modelopt" if named.lower().startswith("modelopt") else named.lower()
    return "modelopt" if "quant_algo" in value else FILES.get(where, "")


def _named(where: str, value: Any) -> str:
    """Returns how a declaration describes the method, for people."""
    if not isinstance(value, Mapping):
        return FILES.get(where, str(value))
    for level in _levels(value):
        for key in _METHOD_KEYS:
            if level.get(key):
                return f"{key} {str(level[key])!r}"
    if where in FILES:
        return FILES[where]
    bits = value.get("bits")
    return f"{bits} bits" if bits else "method not named"


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
