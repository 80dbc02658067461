"""The folder with the small files of a model: its config, its tokenizer, its defaults."""

from __future__ import annotations

from pathlib import Path

from swell.configs.files.model_path import is_gguf


def local_folder(path: str) -> Path | None:
    """Returns the folder with the small files of a local model: the model folder itself, or the one
    into which a GGUF file is unpacked. Returns None for a hub id. Raises ConfigError for a GGUF
    file that cannot be served."""
    if is_gguf(path):
        from swell.configs.files.gguf.unpacked import unpacked

        return unpacked(Path(path))
    return Path(path) if Path(path).is_dir() else None
