"""Writes GGUF files with small tokenizers: byte pairs, and SentencePiece with scores. Their tokens
are learned from a text, the same ones in every run."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.gguf.files import write_gguf

TEXT = """The quick brown fox jumps over the lazy dog. She sells sea shells, and he's sold 1234567
of them; they'll say it's 3.14159, WE'RE here! def f(x): return {"a": [1, 2, 3]}  # naïve café
Größe und Straße; el niño mañana; привет мир, как дела? 你好，世界。こんにちは世界 한국어 안녕 ไทย
http://example.com/path?q=1&r=2 foo_bar fooBar FOO-BAR    four spaces\tand a tab ... --- === ((( )))
the the the there their then these those other another together whether weather hello hello world"""
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
SPACE = "▁"


def byte_letters() -> dict[int, str]:
    """Returns the letter that stands for each byte in a byte-level tokenizer: itself if it can be
    printed, otherwise the next letter from U+0100."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    return {byte: chr(byte) for byte in own} | {
        byte: chr(256 + at) for at, byte in enumerate(others)
    }


def _learn(words: list[list[str]], count: int) -> list[tuple[str, str]]:
    """Returns the pairs that a byte-pair encoding joins, most frequent first."""
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs = Counter(pair for word in words for pair in itertools.pairwise(word))
        best = max(sorted(pairs), key=pairs.__getitem__)
        merges.append(best)
        words = [_joined(word, best) for word in words]
    return merges


def _joined(word: list[str], pair: tuple[str, str]) -> list[str]:
    out: list[str] = []
    for part in word:
        if out and (out[-1], part) == pair:
            out[-1] += part
        else:
            out.append(part)
    return out


def byte_pair_metadata(pre: str) -> dict[str, Any]:
    letters = byte_letters()
    words = [
        [letters[byte] for byte in f" {word}".encode()]
        for word in TEXT.replace("\n", " \n").split(" ")
    ]
    merges = _learn(words, 250)
    texts = [*letters.values(), *(left + right for left, right in merges)]
    texts = [*dict.fromkeys(texts), "Ġzebra"]  # no merges lead to the last one
    types = [NORMAL] * len(texts)
    special = [("<|bos|>", CONTROL), ("<|end|>", CONTROL), ("<tool>", USER), ("\n\n\n", USER)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": texts + [text for text, _ in special],
        "tokenizer.ggml.token_type": types + [kind for _, kind in special],
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.bos_token_id": len(texts),
        "tokenizer.ggml.eos_token_id": len(texts) + 1,
    }


def sentence_piece_metadata(**changes: Any) -> dict[str, Any]:
    text = TEXT.replace(" ", SPACE)
    merges = _learn([list(line) for line in text.split("\n")], 250)
    pieces = [left + right for left, right in merges]
    known = [
        ("<unk>", UNKNOWN, 0.0),
        ("<s>", CONTROL, 0.0),
        ("</s>", CONTROL, 0.0),
        *((f"<0x{byte:02X}>", BYTE, 0.0) for byte in range(256)),
        *((piece, NORMAL, -float(rank)) for rank, piece in enumerate(dict.fromkeys(pieces))),
        *((letter, NORMAL, -1000.0 - at) for at, letter in enumerate(sorted({*text} - {"\n"}))),
        ("<tool>", USER, -1.0),
        ("    ", USER, -1.0),
    ]
    tokens = list({text: (text, kind, score) for text, kind, score in known}.values())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [text for text, _, _ in tokens],
        "tokenizer.ggml.scores": [score for _, _, score in tokens],
        "tokenizer.ggml.token_type": [kind for _, kind, _ in tokens],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def write_tokenizer(path: Path, metadata: Mapping[str, Any]) -> Path:
    """Writes a file with a tokenizer and without weights, which llama.cpp opens too."""
    return write_gguf(path, {"general.architecture": "llama", **metadata}, {})


TOKENIZERS: dict[str, dict[str, Any]] = {
    "sentence pieces": sentence_piece_metadata(),
    "sentence pieces without a prefix": sentence_piece_metadata(add_space_prefix=False),
    **{
        f"byte pairs of {pre}": byte_pair_metadata(pre)
        for pre in (
            "default",
            "gpt-2",
            "llama-bpe",
            "qwen2",
            "qwen35",
            "starcoder",
            "deepseek-coder",
            "deepseek-v3",
            "falcon",
            "tekken",
            "gpt-4o",
            "glm4",
        )
    },
}
