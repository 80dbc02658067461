"""Finds the scheme of a checkpoint's quantized matrices, and builds models as if it had none."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from swell.configs.quantization.declaration import (
    KEYS,
    find_cache_declaration,
    find_declaration,
)
from swell.worker.quantization.scheme import KV_SCALES, Scheme

SCHEMES = {
    "awq": "swell.worker.quantization.awq:Awq",
    "compressed-tensors": "swell.worker.quantization.compressed_tensors:CompressedTensors",
    "fbgemm_fp8": "swell.worker.quantization.fp8:Fp8",
    "fp8": "swell.worker.quantization.fp8:Fp8",
    "gptq": "swell.worker.quantization.gptq:Gptq",
    "modelopt": "swell.worker.quantization.modelopt:ModelOpt",
    "mxfp4": "swell.worker.quantization.fp4:Mxfp4",
}
"""Method -> "module:Class"."""


def find_scheme(path: str, config: Mapping[str, Any], folder: Path | None) -> Scheme | None:
    """Returns the scheme of a model's quantized matrices; None if it declares no quantization. For
    the arguments, and for what is refused with a `ValueError`, see `find_declaration`."""
    declared = find_declaration(path, config, folder)
    if declared is None:
        return None
    module, _, name = SCHEMES[declared.method].partition(":")
    scheme: Scheme = getattr(import_module(module), name)(declared)
    return scheme


def cache_notes(
    config: Mapping[str, Any], folder: Path | None, names: Collection[str]
) -> Sequence[str]:
    """Returns a line for the log about a checkpoint that is made for a quantized KV cache. `names`:
    its stored tensors; for the other arguments see `find_declaration`."""
    scales = min((name for name in names if name.endswith(KV_SCALES)), default=None)
    made_for = find_cache_declaration(config, folder) or scales
    if made_for is None:
        return ()
    return (
        f"the checkpoint is made for a quantized KV cache ({made_for}): only cache.dtype=int8 or "
        "fp8 chooses one, with a scale of its own for each vector "
        "(docs/tune/kv-cache.md)",
    )


def without_quantization(hf_config: Any) -> None:
    """Removes from a config and from those of its parts how the checkpoint is quantized: a model
    is built as if it were not."""
    parts = [hf_config]
    parts += [getattr(hf_config, name, None) for name in getattr(hf_config, "sub_configs", ())]
    for part in parts:
        for key in KEYS:
            if part is not None and key in vars(part):
                delattr(part, key)


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a config.json, and of its parts, without how the checkpoint is
    quantized."""
    kept = {key: value for key, value in config.items() if key not in KEYS}
    return {
        key: plain_config(value) if isinstance(value, Mapping) else value
        for key, value in kept.items()
    }
