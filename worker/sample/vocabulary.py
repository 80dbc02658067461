"""A model's tokens as texts, for grammars: what each one spells, and which ones end an answer."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer


@lru_cache(maxsize=2)
def load_vocabulary(model_path: str) -> LLTokenizer:
    """The tokenizer of a model folder or hub id; its `eos_tokens` are `end_token_ids`.

    Some tenths of a second for 128k tokens; shared by all workers of a process. Raises ValueError
    or OSError for a model without a tokenizer.json and without what can be written as one, or
    without an end.
    """
    from llguidance import LLTokenizer

    folder = _folder(model_path)
    file = folder / "tokenizer.json"
    text = file.read_text() if file.is_file() else _converted(folder)
    tokenizer = Tokenizer.from_str(text)
    ends = end_token_ids(model_path, tokenizer)
    if not ends:
        raise ValueError(f"model {model_path!r} names no token that ends an answer (eos_token_id)")
    return LLTokenizer(_without_gaps(text, tokenizer), eos_token=ends)


def end_token_ids(model_path: str, tokenizer: Tokenizer | None = None) -> list[int]:
    """Ids that end an answer: the model's (generation_config.json, else config.json) and, with a
    tokenizer, the one that tokenizer_config.json names. The edge of the cluster waits for these."""
    folder = _folder(model_path)
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(folder / name).get("eos_token_id")
        if ids is not None:
            found = [ids] if isinstance(ids, int) else list(ids)
            break
    if tokenizer is not None:
        named = _read_json(folder / "tokenizer_config.json").get("eos_token")
        text = named.get("content") if isinstance(named, dict) else named
        own = tokenizer.token_to_id(text) if isinstance(text, str) else None
        # Ids that no token has would be refused, and none of them can be drawn.
        found = [id for id in [*found, own] if id is not None and tokenizer.id_to_token(id)]
    return sorted(set(found))


def _folder(model_path: str) -> Path:
    if Path(model_path).is_dir():
        return Path(model_path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model_path, allow_patterns=["*.json", "tokenizer*", "*.txt"]))


def _converted(folder: Path) -> str:
    """Of an older format, as transformers reads it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(f"{str(folder)!r} has no tokenizer that can be written as tokenizer.json")
    return str(tokenizer.backend_tokenizer.to_str())


def _without_gaps(text: str, tokenizer: Tokenizer) -> str:
    """A tokenizer.json with a special token for every id that no token has: the library takes the
    number of tokens for the largest id."""
    ids = set(tokenizer.get_vocab(with_added_tokens=True).values())
    missing = set(range(max(ids))) - ids
    if not missing:
        return text
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    fillers = {f"<|no token {id}|>": id for id in sorted(missing)}
    data = json.loads(text)
    data["model"]["vocab"].update(fillers)
    data["added_tokens"] += [
        {"id": id, "content": filler, "special": True, **flags} for filler, id in fillers.items()
    ]
    return json.dumps(data)


def _read_json(file: Path) -> dict[str, object]:
    data = json.loads(file.read_text()) if file.is_file() else {}
    return data if isinstance(data, dict) else {}
