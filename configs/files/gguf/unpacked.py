"""The small files of a GGUF model, in a folder that is read like any model folder:

    /tmp/swell-gguf-UID / gate           locked while a process finds or removes folders
                        / DIGEST.used    each process that uses the folder has a shared lock on it
                        / DIGEST / config.json, generation_config.json,
                                   tokenizer.json, tokenizer_config.json, chat_template.jinja
                                   complete.json      the sizes of the others, written last

They are written by the first process that needs them. The digest is that of the file's identity
(path, inode, size, time of its last change) and of this code, so a folder never goes stale. Each
host has its own folder. The kernel drops the locks of a process that ends, so folders without a
living user are found, and removed, by the next process that unpacks a file, and when a server ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

from swell.configs.files.bounded_files import MAX_CONFIG_BYTES, parse_json, read_file
from swell.configs.files.gguf.architectures import model_config
from swell.configs.files.gguf.header import GgufError, GgufFile, identity_of, read_header, shown
from swell.configs.files.gguf.tensor_names import sources
from swell.configs.files.gguf.tokenizer import read_vocabulary, tokenizer_files
from swell.configs.files.private_files import enter_folder

COMPLETE = "complete.json"
_ALWAYS = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
"""The files of every model."""
_LOCK_FLAGS = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Key of `general.sampling` -> its name in generation_config.json."""


def unpacked(path: Path) -> Path:
    """Returns the folder with the small files of a GGUF file. Raises GgufError."""
    try:
        folder = _folder(path)
        with _gate(folder.parent):
            _use(folder)
            _remove_unused(folder.parent)
        if not _is_complete(folder):
            _write(folder, _files(read_header(path)), path.stat().st_mtime)
        return folder
    except OSError as error:
        raise GgufError(f"{path} cannot be unpacked: {error}") from None


def remove_unused() -> None:
    """Stops the use of all folders in this process, and removes those that no process uses."""
    parent = _parent()
    if not parent.exists():
        return
    with contextlib.suppress(OSError), _gate(parent):
        while _used:
            os.close(_used.popitem()[1])
        _remove_unused(parent)


_used: dict[Path, int] = {}
"""Folder -> the descriptor of `DIGEST.used`, which this process has locked."""


@contextlib.contextmanager
def _gate(parent: Path) -> Iterator[None]:
    """Lets one process of this account at a time find and remove folders."""
    with enter_folder(parent, make=True) as folder:
        gate = os.open("gate", _LOCK_FLAGS, 0o600, dir_fd=folder)
        try:
            fcntl.flock(gate, fcntl.LOCK_EX)
            yield
        finally:
            os.close(gate)


def _use(folder: Path) -> None:
    """Keeps a folder until this process ends. The caller holds the gate."""
    if folder not in _used:
        lock = os.open(_lock_of(folder), _LOCK_FLAGS, 0o600)
        fcntl.flock(lock, fcntl.LOCK_SH)  # others lock it exclusively only while they have the gate
        _used[folder] = lock


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.used")


def _remove_unused(parent: Path) -> None:
    """Removes the folders that no process uses. The caller holds the gate."""
    for path in parent.glob("*.used"):
        lock = os.open(path, _LOCK_FLAGS, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            for folder in parent.glob(f"{path.stem}*/"):
                shutil.rmtree(folder, ignore_errors=True)
            path.unlink()
        finally:
            os.close(lock)


def _files(file: GgufFile) -> dict[str, Any]:
    vocabulary = read_vocabulary(file)
    config = model_config(file, vocabulary)
    sources(file)
    generation = _generation_config(file, config)
    tokenizer = tokenizer_files(file, vocabulary)
    return {"config.json": config, "generation_config.json": generation, **tokenizer}


def _generation_config(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    stated: dict[str, Any] = {}
    for key, name in _SAMPLING.items():
        value = file.metadata.get(f"general.sampling.{key}")
        if value is not None and (type(value) not in (int, float) or not isfinite(value)):
            raise GgufError(
                f"{file.path} is damaged: general.sampling.{key}={shown(value)} is not a number"
            )
        stated[name] = value
    tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {name: value for name, value in {**tokens, **stated}.items() if value is not None}


def _folder(path: Path) -> Path:
    identity = "\n".join((_code_digest(), *identity_of(path)))
    digest = hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()
    return _parent() / digest


def _parent() -> Path:
    return Path(tempfile.gettempdir(), f"swell-gguf-{os.getuid()}")


@cache
def _code_digest() -> str:
    digest = hashlib.blake2b(digest_size=12)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _is_complete(folder: Path) -> bool:
    """Whether every file is there: programs that clean /tmp may have removed some, and a loss of
    power may have emptied some."""
    try:
        with enter_folder(folder.parent, make=True), enter_folder(folder):
            sizes = parse_json(read_file(folder / COMPLETE, MAX_CONFIG_BYTES))
            return (
                isinstance(sizes, dict)
                and sizes.keys() >= _ALWAYS
                and all((folder / name).stat().st_size == size for name, size in sizes.items())
            )
    except (FileNotFoundError, ValueError):
        return False


def _write(folder: Path, files: Mapping[str, Any], changed_s: float) -> None:
    """Writes the files. If another process writes them at the same time, one of the two folders
    stays."""
    written = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
            (written / name).write_text(text, encoding="utf-8")
            os.utime(written / name, (changed_s, changed_s))
        sizes = {name: (written / name).stat().st_size for name in files}
        (written / COMPLETE).write_text(json.dumps(sizes), encoding="utf-8")
        if not _is_complete(folder):
            shutil.rmtree(folder, ignore_errors=True)
            written.rename(folder)
    except OSError:
        if not _is_complete(folder):
            raise
    finally:
        shutil.rmtree(written, ignore_errors=True)
