"""The tokenizer and other files of a model folder, GGUF file or hub id."""

from __future__ import annotations

import json
import os
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from swell.configs.files.bounded_files import MAX_CONFIG_BYTES, parse_json, read_file
from swell.configs.files.model_path import local_folder
from swell.configs.schema import ConfigError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)


def import_without_torch() -> None:
    """Imports transformers as if torch were not installed. Its tokenizers do not need torch; this
    saves 4 s of CPU time and 260 MB. Only for a process that uses nothing else of transformers,
    before it imports either; torch itself can be imported afterwards."""
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    # Otherwise it logs that torch is missing.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    sys.modules["torch"] = None  # type: ignore[assignment]  # importlib: it cannot be found
    try:
        import transformers  # noqa: F401
    finally:
        del sys.modules["torch"]


@lru_cache(maxsize=8)
def load_tokenizer(path: str) -> Any:
    """Returns the tokenizer of a model folder, GGUF file or hub id, as transformers reads it;
    loaded once."""
    folder = local_folder(path)
    if folder is not None and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"model.path={path!r} has no tokenizer: it needs one of {', '.join(TOKENIZER_FILES)}; "
            "copy it there from the original model"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path if folder is None else str(folder))
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"the tokenizer of model.path={path!r} cannot be loaded: {reason}; give a folder with "
            "tokenizer.json, or a hub id that can be reached"
        ) from None
    if not tokenizer.chat_template:  # models with towers had it in a file of its own
        tokenizer.chat_template = read_json(path, "chat_template.json").get("chat_template")
    return tokenizer


def load_eos_token_ids(path: str, tokenizer: Any) -> list[int]:
    """Returns the ids that end an answer: the model's (generation_config.json, otherwise
    config.json) and the tokenizer's own. Raises ConfigError for an invalid id."""
    found = load_model_eos_token_ids(path)
    if tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    return sorted(set(found))


def load_model_eos_token_ids(path: str) -> list[int]:
    """Returns the ids in the model's own files. Raises ConfigError for an invalid id."""
    for name in ("generation_config.json", "config.json"):
        config = read_json(path, name)
        value = config.get("eos_token_id")
        if value is None and isinstance(text := config.get("text_config"), dict):
            value = text.get("eos_token_id")  # of a model with towers
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int and i >= 0 for i in ids):
            raise ConfigError(
                f"{Path(path) / name}: eos_token_id={json.dumps(value)} is not a token id; it "
                "must be an integer of at least 0, or a list of such integers, without quotes"
            )
        return list(ids)
    return []


def read_json(path: str, name: str) -> dict[str, Any]:
    """Returns the object in a JSON file of a model; an empty one if there is none."""
    data = read_json_value(path, name)
    return data if isinstance(data, dict) else {}


def written_at(path: str, name: str) -> int:
    """Returns when a file of a model was written, in seconds since 1970; 0 if the file does not
    exist."""
    try:
        file = _model_file(path, name)
        return 0 if file is None else int(file.stat().st_mtime)
    except OSError:
        return 0


def read_json_value(path: str, name: str) -> Any:
    """Returns the contents of a JSON file of a model; None if the file does not exist."""
    file = _model_file(path, name)
    if file is None:
        return None
    try:
        return parse_json(read_file(file, MAX_CONFIG_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None


def _model_file(path: str, name: str) -> Path | None:
    """Returns the path of a file of a model, which may not exist in a folder. `path` is a folder, a
    GGUF file or a hub id; returns None if the hub lacks the file."""
    folder = local_folder(path)
    if folder is not None:
        return folder / name
    from transformers.utils import cached_file

    cached = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return None if cached is None else Path(cached)


def encode_text(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    """Returns the ids of one text; `tokenizer` is transformers'. Its own method is not thread-safe,
    but its backend is."""
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    # Only the backend's batch methods let other threads run meanwhile: `encode` holds the
    # interpreter's lock for seconds per megabyte.
    (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return list(encoding.ids)
