"""A SentencePiece tokenizer with scores, as the `tokenizer.json` of a byte-pair encoding.

SentencePiece joins the two neighbours whose joined text has the best score, until no joined text is
a token. A byte-pair encoding joins the neighbours that are first in its list of merges. So the list
holds every way to split every token into two tokens, ordered by the token's score.
"""

from __future__ import annotations

from typing import Any

from swell.configs.files.gguf.header import GgufError, GgufFile
from swell.configs.files.gguf.tokenizer import (
    BYTE,
    NORMAL,
    TokenizerModel,
    Vocabulary,
    token_id,
)

SPACE = "▁"
"""Stands for a space within a token."""
MAX_TOKEN_CHARS = 256
"""Limit for a token's length."""
MAX_CUTS = 2**23
"""Limit for the number of characters of all tokens together: a token may be split after each of
its characters. The largest vocabulary has about 2 000 000."""
MAX_MERGES = 2**21
"""Limit for the merges. The largest vocabulary has about 600 000."""


def sentence_pieces(file: GgufFile, vocabulary: Vocabulary) -> TokenizerModel:
    """Returns the parts of the `tokenizer.json`. Raises GgufError."""
    unknown = token_id(file, vocabulary, "unknown")
    has_bytes = vocabulary.types.count(BYTE) == 256
    if unknown is None and not has_bytes:
        raise GgufError(
            f"{file.path}: its tokenizer has neither an unknown token nor one token for each byte, "
            "so that not every text has tokens; serve the folder from which the file was made"
        )
    prefixed = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces: dict[str, Any] = {
        "type": "Replace",
        "pattern": {"String": " "},
        "content": SPACE,
    }
    prefix = [{"type": "Prepend", "prepend": SPACE}] if prefixed else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    text_of_spaces = {**spaces, "pattern": {"String": SPACE}, "content": " "}
    parts = {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, spaces]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [text_of_spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if unknown is None else vocabulary.texts[unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": has_bytes,
            "ignore_merges": False,
            "vocab": vocabulary.ids(),
            "merges": _merges(file, vocabulary),
        },
    }
    return TokenizerModel(parts, adds_bos=True)


def _merges(file: GgufFile, vocabulary: Vocabulary) -> list[tuple[str, str]]:
    ids = vocabulary.ids()
    scores, types = vocabulary.scores, vocabulary.types
    merges: list[tuple[str, str]] = []
    if (chars := sum(map(len, ids))) > MAX_CUTS:
        raise GgufError(
            f"{file.path} is damaged: its tokens have {chars} characters; the limit is {MAX_CUTS}"
        )
    for text, id in sorted(ids.items(), key=lambda token: -scores[token[1]]):
        if types[id] != NORMAL:
            continue
        if len(text) > MAX_TOKEN_CHARS:
            raise GgufError(
                f"{file.path} is damaged: token {id} has {len(text)} characters; the limit is "
                f"{MAX_TOKEN_CHARS}"
            )
        cuts = (at for at in range(1, len(text)) if text[:at] in ids and text[at:] in ids)
        merges += [(text[:at], text[at:]) for at in cuts]
        if len(merges) > MAX_MERGES:
            raise GgufError(
                f"{file.path} is damaged: there are more than {MAX_MERGES} ways to split its "
                "tokens into two tokens, the limit"
            )
    return merges
