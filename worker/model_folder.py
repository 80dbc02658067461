"""The local folder of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def model_folder(path: str, patterns: Sequence[str]) -> Path:
    """Returns `path` itself if it is a folder. Otherwise `path` is a hub id: downloads the files
    that match `patterns` and returns their folder in the hub's cache. Raises what the hub's client
    raises."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, allow_patterns=list(patterns)))
