"""A model's vocabulary, for grammars: the text of each token, and the tokens that end an answer.

A grammar treats a token as text exactly if a client sees its text: all tokens except special ones.
The library (llguidance) differs in two cases:

- It does not treat an added token with a name like `<...>` as text, although clients see `<think>`
  with `special: false`. Such tokens become ordinary ones here.
- It tokenizes text that a grammar forces, and a tokenizer turns `<|im_end|>` into the special
  token, which does not stand for text. Here, special tokens get names that do not occur in any
  text, so that such a text is tokenized as its characters. Grammars name special tokens by id.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from swell.configs.files.bounded_files import (
    MAX_CONFIG_BYTES,
    MAX_TEXT_FILE_BYTES,
    parse_json,
    read_file,
)
from swell.worker.model_folder import model_folder

if TYPE_CHECKING:
    from llguidance import LLTokenizer


TOKENIZER_FILES = ("*.json", "tokenizer*", "*.txt")


@lru_cache(maxsize=2)
def load_vocabulary(model_path: str) -> LLTokenizer:
    """Returns the tokenizer of a model folder, GGUF file or hub id; its `eos_tokens` are
    `end_token_ids`.

    Takes some tenths of a second for 128k tokens; the result is shared by all workers of a process.
    Raises `ValueError` or `OSError` if the model lacks end tokens, or a tokenizer that is, or can
    be converted to, a tokenizer.json.
    """
    from llguidance import LLTokenizer

    folder = model_folder(model_path, TOKENIZER_FILES)
    file = folder / "tokenizer.json"
    is_there = file.is_file()
    text = read_file(file, MAX_TEXT_FILE_BYTES).decode() if is_there else _converted(folder)
    tokenizer = Tokenizer.from_str(text)
    ends = end_token_ids(model_path, tokenizer)
    if not ends:
        raise ValueError(f"model {model_path!r} has no token that ends an answer (eos_token_id)")
    return LLTokenizer(_as_texts(text, tokenizer), eos_token=ends)


def end_token_ids(model_path: str, tokenizer: Tokenizer | None = None) -> list[int]:
    """Returns the ids that end an answer: the model's (from generation_config.json, otherwise from
    config.json) and, with a tokenizer, the one that tokenizer_config.json names. The API stops at
    the same ids."""
    folder = model_folder(model_path, TOKENIZER_FILES)
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        config = _read_json(folder / name)
        ids = config.get("eos_token_id")
        if ids is None and isinstance(text := config.get("text_config"), dict):
            ids = text.get("eos_token_id")  # of a model with towers
        if ids is not None:
            found = [ids] if isinstance(ids, int) else list(ids)
            break
    if tokenizer is not None:
        named = _read_json(folder / "tokenizer_config.json").get("eos_token")
        text = named.get("content") if isinstance(named, dict) else named
        own = tokenizer.token_to_id(text) if isinstance(text, str) else None
        # The library would refuse ids that do not belong to a token; these cannot be sampled.
        found = [id for id in [*found, own] if id is not None and tokenizer.id_to_token(id)]
    return sorted(set(found))


def _converted(folder: Path) -> str:
    """Returns the tokenizer.json of a tokenizer in an older format, converted by transformers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(f"{str(folder)!r} has no tokenizer that can be saved as tokenizer.json")
    return str(tokenizer.backend_tokenizer.to_str())


def _as_texts(text: str, tokenizer: Tokenizer) -> str:
    """Returns a tokenizer.json in which all tokens except the special ones are text. Special tokens
    get random names, and an id that does not belong to a token becomes a special token: the library
    derives the largest id from the number of tokens."""
    data: dict[str, Any] = json.loads(text)
    byte_level = "ByteLevel" in json.dumps(data["decoder"])
    ids = set(tokenizer.get_vocab(with_added_tokens=True).values())
    nonce = secrets.token_hex(8)
    names = {id: f"<|{nonce} {id}|>" for id in range(max(ids)) if id not in ids}
    pieces, added = dict(names), []
    for token in data["added_tokens"]:
        id, content = token["id"], token["content"]
        if token["special"]:
            names[id] = pieces[id] = f"<|{nonce} {id}|>"
        elif content.startswith("<") and content.endswith(">"):
            pieces[id] = _byte_level(content) if byte_level else content
        else:
            pieces[id] = content
            added.append(token)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added += [{"id": id, "content": names[id], "special": True, **flags} for id in names]
    data["added_tokens"] = sorted(added, key=lambda token: token["id"])
    _rename(data["model"], pieces)
    return json.dumps(data)


def _byte_level(content: str) -> str:
    """Returns an added token in the spelling of a byte-level vocabulary. A token that consists only
    of characters that represent bytes stays as it is: decoders also read it as these bytes."""
    chars = _byte_chars()
    if set(content) <= set(chars):
        return content
    return "".join(chars[byte] for byte in content.encode())


def _byte_chars() -> list[str]:
    """Returns the character that represents each byte in byte-level vocabularies, as defined by
    GPT-2: a printable Latin-1 character represents itself, and the other bytes use 256 and
    following."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (chr(code) for code in range(0x100, 0x200))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]


def _rename(model: dict[str, Any], pieces: Mapping[int, str]) -> None:
    """Sets each id's piece in the vocabulary, and drops merges that use an old name."""
    vocab = model["vocab"]
    if isinstance(vocab, list):  # pieces with their scores, by id
        lowest = min((score for _, score in vocab), default=0.0)
        vocab += [["", lowest]] * (max(pieces, default=-1) + 1 - len(vocab))
        for id, piece in pieces.items():
            vocab[id] = [piece, vocab[id][1]]
        return
    gone = {piece for piece, id in vocab.items() if pieces.get(id, piece) != piece}
    model["vocab"] = {piece: id for piece, id in vocab.items() if piece not in gone}
    if model.get("unk_token") in gone:
        model["unk_token"] = pieces[vocab[model["unk_token"]]]
    model["vocab"].update({piece: id for id, piece in pieces.items()})
    if gone and "merges" in model:
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [pair for pair in pairs if gone.isdisjoint({*pair, "".join(pair)})]


def _read_json(file: Path) -> dict[str, Any]:
    data = parse_json(read_file(file, MAX_CONFIG_BYTES)) if file.is_file() else {}
    return data if isinstance(data, dict) else {}
