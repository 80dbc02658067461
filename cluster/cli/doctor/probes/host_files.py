"""Files that every host needs at the same path with the same content: whether this host can read
them, their sizes and their digests. Fast even for large files: of weights only the header is read,
which lists the name, type, shape and offset of every tensor."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import swell.configs as configs_package
from swell.cluster.cli.doctor.facts import FileFacts
from swell.configs.files.adapter_files import CONFIG_NAME, WEIGHTS_NAME
from swell.configs.runtime.secret import SecretBytes
from swell.configs.schema import SERVE_FILES, Config


def named_paths(config: Config) -> dict[str, str]:
    """Returns the files that must be readable, by configuration key. Hub ids are left out: each
    host has its own cache."""
    serve = config.serve
    paths = {f"serve.{key}": getattr(serve, key) for key in SERVE_FILES if getattr(serve, key)}
    for name, folder in config.lora.adapters.items():
        paths[f"lora.adapters.{name}"] = str(Path(folder, WEIGHTS_NAME))
    if Path(config.model.path).is_absolute():
        paths["model.path"] = str(Path(config.model.path, "config.json"))
    if config.drafts.model is not None and Path(config.drafts.model.path).is_absolute():
        paths["drafts.model"] = str(Path(config.drafts.model.path, "config.json"))
    return paths


def unreadable(paths: Mapping[str, str]) -> list[str]:
    """Returns the keys whose files this host cannot read."""
    return [key for key, path in paths.items() if not os.access(path, os.R_OK)]


_FLOORS = ("cluster", "configs", "coordinator", "engine", "kernels", "worker")
_CODE = (".py", ".cpp", ".h")
_WEIGHTS = ".safetensors"
_READ_BYTES = 64 * 2**20
"""Maximum number of bytes read of a file: tokenizers of large vocabularies have 40 MiB."""
_MOST_FILES = 2000
"""Maximum number of files of a model folder; checkpoints have some hundred."""
_DIGEST_BYTES = 8


def config_files(config: Config, salt: SecretBytes) -> dict[str, FileFacts]:
    """Returns facts of the files of the model and of adapters, by name, and of files that `serve`
    names, by configuration key. Files that cannot be read are left out."""
    found: dict[str, FileFacts] = {}
    folder = local_folder(config.model.path)
    if folder is not None:
        for path in sorted(_model_files(folder))[:_MOST_FILES]:
            _add(found, path.name, path, salt)
    for adapter, adapter_folder in config.lora.adapters.items():
        for file_name in (CONFIG_NAME, WEIGHTS_NAME):
            _add(found, f"{adapter}/{file_name}", Path(adapter_folder, file_name), salt)
    for key in SERVE_FILES:
        if name := getattr(config.serve, key):
            _add(found, f"serve.{key}", Path(name), salt)
    return found


def local_folder(path: str) -> Path | None:
    """Returns the model's folder, or the cached folder of a hub id on this host; None: not cached
    yet."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(path, "config.json")
    except HFValidationError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def source_digest() -> str:
    """Returns the digest of the source files of the package `swell` that this process runs."""
    top = Path(str(configs_package.__file__)).parents[1]
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for path in sorted(_source_files(top)):
        digest.update(path.relative_to(top).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def _source_files(top: Path) -> Iterator[Path]:
    """Yields the source files of packages; scripts outside packages are not installed."""
    for floor in _FLOORS:
        for path in (top / floor).rglob("*"):
            if path.suffix in _CODE and (path.parent / "__init__.py").is_file():
                yield path


def _model_files(folder: Path) -> Iterator[Path]:
    """Yields the model's files, without subfolders and other formats of the same weights."""
    for path in folder.iterdir():
        if path.is_file() and path.suffix in (".json", ".jinja", ".model", ".txt", _WEIGHTS):
            yield path


def _add(found: dict[str, FileFacts], name: str, path: Path, salt: SecretBytes) -> None:
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = _READ_BYTES
            if path.suffix == _WEIGHTS:
                length = min(length, int.from_bytes(file.read(8), "little"))
            content = file.read(length)
    except OSError:
        return
    digest = hashlib.blake2b(content, key=salt, digest_size=_DIGEST_BYTES).hexdigest()
    found[name] = FileFacts(size_bytes=size_bytes, digest=digest)
