"""The files of a model with which prompts are read and answers are written. All versions in a
cluster must have the same ones, because its ingresses load them once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from swell.cluster.text.prompt.prompt_embeds import load_embeds_width
from swell.configs.files.bounded_files import (
    MAX_CONFIG_BYTES,
    MAX_TEXT_FILE_BYTES,
    digest_file,
    parse_json,
    read_file,
)
from swell.configs.files.model_path import local_folder
from swell.configs.schema import ModelConfig

_NAMES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config_sentence_transformers.json",
    "generation_config.json",
    "merges.txt",
    "modules.json",
    "sentence_bert_config.json",
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
_CONFIG_KEYS = ("architectures", "bos_token_id", "eos_token_id", "id2label", "vocab_size")
_DIGITS = 16


def text_files(model: ModelConfig) -> dict[str, str]:
    """Returns the digest of each file by name, and the values of the `config.json` keys that affect
    text. For a hub model, returns only its name. Raises OSError, and ValueError for a broken
    config.json."""
    folder = local_folder(model.path)
    if folder is None:
        return {"model.path": model.path}
    found = {
        file.name: digest_file(file, MAX_TEXT_FILE_BYTES, _DIGITS // 2) for file in _files(folder)
    }
    config = parse_json(read_file(folder / _CONFIG, MAX_CONFIG_BYTES))
    if not isinstance(config, dict):
        raise ValueError(f"{folder / _CONFIG} does not contain a JSON object")
    for key in _CONFIG_KEYS:
        found[f"{_CONFIG}: {key}"] = json.dumps(config.get(key))
    width = load_embeds_width(model)
    if width is not None:
        found[f"{_CONFIG}: the width of embeddings"] = str(width.numbers)
    return found


def text_digest(model: ModelConfig) -> str:
    """Returns one digest of all files. Raises the same errors."""
    return _digest(json.dumps(text_files(model), sort_keys=True).encode())


def _files(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.iterdir()):
        if file.is_file() and (file.name in _NAMES or file.suffix == _TIKTOKEN):
            yield file


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=_DIGITS // 2).hexdigest()
