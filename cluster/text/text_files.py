"""The files of a model by which prompts are read and answers are written: all versions of a cluster
have the same, because its ingresses load them once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

_NAMES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
_TIKTOKEN = ".tiktoken"
_CONFIG = "config.json"
_CONFIG_KEYS = ("bos_token_id", "eos_token_id", "vocab_size")
_DIGITS = 16


def text_files(path: str) -> dict[str, str]:
    """Digests by name of what is there, `config.json` by the keys that text depends on. Of a hub's
    model the name alone is known. Raises OSError, and ValueError for a broken config.json."""
    folder = Path(path)
    if not folder.is_dir():
        return {"model.path": path}
    found = {file.name: _digest(file.read_bytes()) for file in _files(folder)}
    config = json.loads((folder / _CONFIG).read_bytes())
    for key in _CONFIG_KEYS:
        found[f"{_CONFIG}: {key}"] = json.dumps(config.get(key))
    return found


def text_digest(path: str) -> str:
    """Of all of them. The same errors."""
    return _digest(json.dumps(text_files(path), sort_keys=True).encode())


def _files(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.iterdir()):
        if file.is_file() and (file.name in _NAMES or file.suffix == _TIKTOKEN):
            yield file


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=_DIGITS // 2).hexdigest()
