"""Tells whether the name of a model is a path or a hub id, and identifies a path that is not a
model."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

MODEL = "a folder with config.json and safetensors, a GGUF file"
GGUF = ".gguf"
"""The suffix of the only files that are models."""
_PART = re.compile(r"-\d{5}-of-\d{5}$")
"""The end of the name of one file of a split model, without its suffix."""
_FILES = {
    GGUF: "a GGUF file",
    ".safetensors": "a file with only the weights, without config.json and tokenizer",
    ".bin": "a file of weights in torch's pickle format, which is not read",
    ".pt": "a file of weights in torch's pickle format, which is not read",
    ".pth": "a file of weights in torch's pickle format, which is not read",
    ".ckpt": "a training checkpoint, which is not read",
    ".onnx": "an ONNX file, which is not read",
    ".json": "a JSON file, not the folder that contains it",
}
"""File suffix -> description of such a file, for error messages."""


def resolved(name: str, base: Path) -> str:
    """Returns the absolute path of `name` relative to `base` if it exists there; otherwise returns
    the name unchanged. A name whose first part exists is treated as a path: `configs/nosuch` does
    not mean a model of the owner `configs`."""
    path = Path(os.path.expanduser(name))
    first = path.parts[0] if path.parts else ""
    with contextlib.suppress(OSError, ValueError):  # no file can have such a name
        is_here = not path.is_absolute() and first and (base / first).exists()
        if is_here or (base / path).is_dir() or (path.suffix == GGUF and (base / path).is_file()):
            return str((base / path).resolve())
    return name


def is_gguf(path: str) -> bool:
    """Whether a path is that of a GGUF file."""
    return path.endswith(GGUF) and os.path.isfile(path)


def short_name(path: str) -> str:
    """Returns the last part of a path or hub id; for a GGUF file, without its suffix and the number
    of its part."""
    name = os.path.basename(os.path.normpath(path))
    return _PART.sub("", name.removesuffix(GGUF)) if name.endswith(GGUF) else name


def is_path(name: str) -> bool:
    """Whether a name that is not an existing model cannot be a hub id, which has the form
    `owner/name`."""
    return name.startswith((".", "/", "~")) or name.count("/") != 1 or Path(name).suffix in _FILES


def refusal(name: str) -> str:
    """Returns why a path is not a model, and what to pass instead."""
    path = Path(name)
    remedy = f"specify {MODEL}, or a hub id such as owner/name"
    with contextlib.suppress(OSError, ValueError):
        if path.is_file() or path.suffix in _FILES:
            what = _FILES.get(path.suffix, "a file")
            missing = "" if path.is_file() else " (and does not exist)"
            return f"is {what}{missing}; {remedy}"
        if path.is_absolute() and not path.exists():
            parent = next(folder for folder in path.parents if folder.exists())
            lacks = path.relative_to(parent).parts[0]
            return f"is not a folder: {str(parent)!r} has no {lacks!r}; {remedy}"
    return f"is not a folder; {remedy}"


def local_folder(path: str) -> Path | None:
    """Returns the folder with the small files of a local model: the model folder itself, or the one
    into which a GGUF file is unpacked. Returns None for a hub id. Raises ConfigError for a GGUF
    file that cannot be served."""
    if is_gguf(path):
        from swell.configs.files.gguf.unpacked import unpacked

        return unpacked(Path(path))
    return Path(path) if Path(path).is_dir() else None
