"""Checks of the model's files before anything is started: files and numbers, no process.

Every check raises ConfigError with one line: the problem, the value, the limit, the solution.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from swell.cluster.text.tokens.generation_config import read_generation_config
from swell.cluster.text.tokens.tokenizer import load_model_eos_token_ids
from swell.configs.files import model_path
from swell.configs.files.adapter_files import check_adapters
from swell.configs.files.bounded_files import (
    MAX_CONFIG_BYTES,
    MAX_INDEX_BYTES,
    open_regular,
    parse_json,
    read_file,
)
from swell.configs.files.model_path import local_folder
from swell.configs.files.sharded_index import INDEX_NAME, check_sharded, is_sharded
from swell.configs.quantization.declaration import Declaration, find_declaration
from swell.configs.schema import Config, ConfigError

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
"""Limit on the header of a safetensors file, from the format's specification."""


def check(config: Config) -> None:
    """Runs all checks of `swell serve`. The loader checks a hub id."""
    check_adapters(config.lora)
    _check_draft_model(config)
    path = config.model.path
    try:
        folder = local_folder(path)
    except ConfigError as error:
        raise ConfigError(str(error), "model.path") from None
    if folder is None:
        if model_path.is_path(path):
            raise ConfigError(f"model.path={path!r} {model_path.refusal(path)}", "model.path")
        return
    _refuse_folder_of_gguf(folder)
    model = read_json(folder / "config.json", "a model folder holds one")
    if not model.get("architectures") and not model.get("model_type"):
        raise ConfigError(
            f"{folder / 'config.json'} has neither 'architectures' nor "
            "'model_type'; copy it from the original model"
        )
    quantization = find_quantization(path, model, folder)
    if is_sharded(config.model):
        check_sharded(config)
    elif _has_weights(config.model.load_format, path):
        _check_weights(folder, quantization)
    _check_split(config, model)
    read_generation_config(config.model)
    load_model_eos_token_ids(path)


def find_quantization(
    path: str, model: Mapping[str, Any], folder: Path | None
) -> Declaration | None:
    """Returns how a checkpoint is quantized. `model`: its config.json; `folder`: the folder with
    it, if it is local. Raises ConfigError for what the loader would refuse."""
    try:
        return find_declaration(path, model, folder)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_draft_model(config: Config) -> None:
    """Checks the folder of the draft model. Whether it fits the main model is checked by the
    loader, which reads both configs."""
    small = config.drafts.model
    if small is None:
        return
    try:
        folder = local_folder(small.path)
    except ConfigError as error:
        raise ConfigError(f"drafts.model={small.path!r}: {error}", "drafts.model") from None
    if folder is None:
        if model_path.is_path(small.path):
            text = f"drafts.model={small.path!r} {model_path.refusal(small.path)}"
            raise ConfigError(text, "drafts.model")
        return
    try:
        _refuse_folder_of_gguf(folder)
        model = read_json(folder / "config.json", "a model folder holds one")
        quantization = find_quantization(small.path, model, folder)
        if _has_weights(small.load_format, small.path) and not (folder / INDEX_NAME).is_file():
            _check_weights(folder, quantization)
    except ConfigError as error:
        raise ConfigError(f"drafts.model={small.path!r}: {error}", "drafts.model") from None


def _refuse_folder_of_gguf(folder: Path) -> None:
    if (folder / "config.json").is_file():
        return
    if found := sorted(folder.glob("*.gguf")):
        raise ConfigError(
            f"{folder} is a folder of GGUF files without config.json; specify the file, for "
            f"example {found[0]}"
        )


def read_json(path: Path, why: str, limit_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Returns the content of a file. `why`: what the file is for. Raises ConfigError."""
    try:
        data = parse_json(read_file(path, limit_bytes))
    except FileNotFoundError:
        raise ConfigError(f"{path} cannot be read; {why}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error}); {why}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} does not contain a JSON object")
    return data


def _has_weights(load_format: str, path: str) -> bool:
    """Whether a model's folder must have weights; the header of a GGUF file was already checked."""
    return load_format != "dummy" and not model_path.is_gguf(path)


def _check_weights(folder: Path, quantization: Declaration | None) -> None:
    names = _check_files(folder)
    if quantization is not None:
        try:
            quantization.refuse_tensors(names)
        except ValueError as error:
            raise ConfigError(f"{folder}: {error}") from None


def _check_files(folder: Path) -> Collection[str]:
    """Checks the files with the weights. Returns the names of the tensors."""
    if (folder / _WEIGHTS).is_file():
        return _check_whole(folder / _WEIGHTS)
    if not (folder / _INDEX).is_file():
        raise ConfigError(
            f"{folder} has no weights: neither {_WEIGHTS} nor {_INDEX}; copy them there, or set "
            "model.load_format=dummy to run with random weights"
        )
    index = read_json(folder / _INDEX, "it lists the weight shards", MAX_INDEX_BYTES)
    weight_map: dict[str, str] = index.get("weight_map", {})
    shards = set(weight_map.values())
    missing = sorted(shard for shard in shards if not (folder / shard).is_file())
    if missing:
        raise ConfigError(
            f"{folder} lacks {len(missing)} of {len(shards)} weight shards, first {missing[0]!r}; "
            "copy the missing files there"
        )
    for shard in sorted(shards):
        _check_whole(folder / shard)
    return weight_map.keys()


def _check_whole(path: Path) -> Collection[str]:
    """Checks the length that a safetensors file states: 8 bytes, which hold the length of the
    header, then the header and the tensors. Returns the names of the tensors."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            header_bytes = int.from_bytes(file.read(8), "little")
            is_bounded = header_bytes < min(size_bytes, _MAX_HEADER_BYTES)
            text = file.read(header_bytes) if is_bounded else b""
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        header = parse_json(text)
        data_bytes = max(
            (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"),
            default=0,
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(f"{path} is not a safetensors file; copy it there again") from None
    whole_bytes = 8 + header_bytes + data_bytes
    if size_bytes != whole_bytes:
        raise ConfigError(
            f"{path} is damaged: it has {size_bytes} bytes, and its header says {whole_bytes}; "
            "copy it there again"
        )
    return [name for name in header if name != "__metadata__"]


def _check_split(config: Config, model: dict[str, Any]) -> None:
    """Checks numbers of the model against the numbers of workers."""
    parallel = config.parallel
    heads, layers = model.get("num_attention_heads"), model.get("num_hidden_layers")
    if isinstance(heads, int) and heads % parallel.tensor:
        raise ConfigError(
            f"parallel.tensor={parallel.tensor} does not divide the model's {heads} attention "
            f"heads; set it to a divisor of {heads}"
        )
    if isinstance(layers, int) and layers < parallel.pipeline:
        raise ConfigError(
            f"parallel.pipeline={parallel.pipeline} is above the model's {layers} layers"
        )
    positions = model.get("max_position_embeddings")
    longest = config.model.max_model_len
    if isinstance(positions, int) and longest is not None and longest > positions:
        raise ConfigError(
            f"model.max_model_len={longest} is above the model's max_position_embeddings="
            f"{positions}"
        )
