"""The local folder of a model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from swell.configs.files.model_path import local_folder
from swell.configs.runtime.log import first_line

WEIGHT_FILES = ("*.json", "*.safetensors")
"""The files that loading needs."""


def model_folder(path: str, patterns: Sequence[str]) -> Path:
    """Returns `path` itself if it is a folder, and the folder with the small files of a GGUF file.
    Otherwise `path` is a hub id: downloads the files that match `patterns` and returns their folder
    in the hub's cache. Raises what the hub's client raises."""
    folder = local_folder(path)
    if folder is not None:
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, allow_patterns=list(patterns)))


def weights_folder(path: str) -> Path:
    """Returns the local folder of a model's weights, as `model_folder`. Raises `ValueError`."""
    check_path(path)
    try:
        return model_folder(path, WEIGHT_FILES)
    except Exception as error:
        raise ValueError(
            f"model {path!r}: there is no such folder, and the hub did not return the model "
            f"({first_line(error)}); check model.path, the network, and HF_TOKEN"
        ) from None


def check_path(path: str) -> None:
    """Raises `ValueError` for a folder without a model, and for a path that cannot be a hub id."""
    folder = local_folder(path)
    if folder is not None:
        if not (folder / "config.json").is_file():
            raise ValueError(f"model {path!r} has no config.json, so it is not a model folder")
        return
    parts = path.split("/")
    if os.path.isabs(path) or path.startswith((".", "~")) or not 1 <= len(parts) <= 2:
        raise ValueError(f"model {path!r}: there is no such folder; check model.path")
