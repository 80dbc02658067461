"""Refuses quantized checkpoints: their numbers are meaningless without their scales.

A checkpoint can declare that it is quantized in config.json, in another file of its folder, or only
by the types of its tensors; `refuse_quantized` checks the first two, the reader of safetensors
files the third.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from swell.configs.files.bounded_files import MAX_CONFIG_BYTES, parse_json, read_file

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

METHOD_KEYS = ("quant_method", "quant_algo", "quant_type", "format")
WAY_OUT = "serve the checkpoint from which it was made, in bfloat16, float16 or float32"
SHOWN_CHARS = 200


def refuse_quantized(path: str, hf_config: Any) -> None:
    """Raises `ValueError` if the config, or a file of the folder `path`, says that the model is
    quantized.

    A hub id cannot be checked before the download: call again with the folder to which it was
    downloaded.
    """
    for where, value in [*_in_config(hf_config), *_in_files(Path(path))]:
        raise ValueError(
            f"model {path!r} is quantized ({_method(where, value)}): {where}={_shown(value)} is "
            f"not supported; {WAY_OUT}. If its weights are not quantized, remove {where}"
        )


def _in_config(hf_config: Any) -> Iterator[tuple[str, Any]]:
    parts = {"": hf_config}
    for name in getattr(hf_config, "sub_configs", None) or {}:
        parts[f"{name}."] = getattr(hf_config, name, None)
    for prefix, part in parts.items():
        for key in KEYS:
            value = getattr(part, key, None)
            if value:
                yield prefix + key, value


def _in_files(folder: Path) -> Iterator[tuple[str, Any]]:
    for name in FILES:
        file = folder / name
        if not file.is_file():
            continue
        try:
            value = parse_json(read_file(file, MAX_CONFIG_BYTES))
        except (OSError, ValueError):
            value = "a file that cannot be read"
        if _is_quantized(value):
            yield name, value


def _is_quantized(value: Any) -> bool:
    """Whether a file names a method. ModelOpt also writes a file with a null method for unquantized
    models."""
    inner = value.get("quantization") if isinstance(value, dict) else None
    if isinstance(inner, dict) and "quant_algo" in inner:
        return bool(inner["quant_algo"] or inner.get("kv_cache_quant_algo"))
    return bool(value)


def _method(where: str, value: Any) -> str:
    """Returns the method that the value names, otherwise the method whose tools write such a
    file."""
    values = value.to_dict() if hasattr(value, "to_dict") else value
    if not isinstance(values, Mapping):
        return FILES.get(where, str(values))
    inner = values.get("quantization")
    for level in (values, inner if isinstance(inner, Mapping) else {}):
        for key in METHOD_KEYS:
            if level.get(key):
                return f"{key} {str(level[key])!r}"
    if where in FILES:
        return FILES[where]
    bits = values.get("bits")
    return f"{bits} bits" if bits else "method not named"


def _shown(value: Any) -> str:
    values = value.to_dict() if hasattr(value, "to_dict") else value
    text = json.dumps(values, default=str)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
