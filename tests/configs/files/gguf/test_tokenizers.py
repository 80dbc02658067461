"""Token ids equal those of llama.cpp. `tests/data/gguf_token_ids.json` holds what llama-cpp-python
0.3.36 returned, with its bos token, for the files of `tests/support/gguf/tokenizers.py`."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from swell.configs.files.gguf.byte_pairs import SPLITS
from swell.configs.files.gguf.header import read_header
from swell.configs.files.gguf.spm import MAX_CUTS, MAX_MERGES, MAX_TOKEN_CHARS
from swell.configs.files.gguf.tokenizer import end_token_ids, read_vocabulary, tokenizer_files
from swell.configs.section import ConfigError
from tests.support.gguf.tokenizers import (
    SPACE,
    TOKENIZERS,
    byte_pair_metadata,
    sentence_piece_metadata,
    write_tokenizer,
)
from tests.support.paths import ROOT

RECORDED = json.loads((ROOT / "tests" / "data" / "gguf_token_ids.json").read_text())
LINES: list[str] = RECORDED["lines"]


def tokenizer_of(folder: Path, metadata: dict[str, Any]) -> Tokenizer:
    file = read_header(write_tokenizer(folder / "t.gguf", metadata))
    files = tokenizer_files(file, read_vocabulary(file))
    return Tokenizer.from_str(json.dumps(files["tokenizer.json"]))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_equal_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, TOKENIZERS[name])
    for line, ids in zip(LINES, RECORDED["ids"][name], strict=True):
        assert tokenizer.encode(line).ids == ids, line


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_are_decoded_to_their_text(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, TOKENIZERS[name])
    special = ("<|", "<s>")
    for line in LINES:
        if any(text in line for text in special) or SPACE in line:
            continue
        ids = tokenizer.encode(line, add_special_tokens=False).ids
        parted = "<tool>" in line or "    " in line  # each part gets a prefix
        if not (parted and name == "sentence pieces"):
            assert tokenizer.decode(ids) == line


def best_pieces(text: str, metadata: dict[str, Any]) -> list[str]:
    """Joins the two neighbours whose joined text has the best score, the first ones of several,
    until no joined text is a token: SentencePiece's rule, step by step."""
    known = {
        piece: score
        for piece, score, kind in zip(
            metadata["tokenizer.ggml.tokens"],
            metadata["tokenizer.ggml.scores"],
            metadata["tokenizer.ggml.token_type"],
            strict=True,
        )
        if kind == 1
    }
    parts = list(SPACE + text.replace(" ", SPACE)) if text else []
    while True:
        joined = [
            (known[left + right], -at)
            for at, (left, right) in enumerate(itertools.pairwise(parts))
            if left + right in known
        ]
        if not joined:
            return parts
        at = -max(joined)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@given(st.text(st.sampled_from("theirsoand wq."), max_size=40))
def test_sentence_pieces_are_joined_by_their_scores(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    metadata = sentence_piece_metadata()
    if "    " in text:  # a token of its own
        return
    tokenizer = tokenizer_of(tmp_path_factory.mktemp("t"), metadata)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert [tokenizer.id_to_token(id) for id in ids] == best_pieces(text, metadata)


def test_edge_tokens_follow_the_metadata(tmp_path: Path) -> None:
    def edges(**changes: Any) -> tuple[bool, bool]:
        ids = tokenizer_of(tmp_path, sentence_piece_metadata(**changes)).encode("a").ids
        return ids[0] == 1, ids[-1] == 2

    assert edges() == (True, False)
    assert edges(add_bos_token=False) == (False, False)
    assert edges(add_eos_token=True) == (True, True)
    assert edges(bos_token_id=10**6) == (False, False)


def test_known_end_tokens_are_found_by_their_text(tmp_path: Path) -> None:
    metadata = byte_pair_metadata("gpt-2")
    texts = metadata["tokenizer.ggml.tokens"]
    file = read_header(write_tokenizer(tmp_path / "t.gguf", metadata))
    end, bos = texts.index("<|end|>"), texts.index("<|bos|>")
    assert end_token_ids(file, read_vocabulary(file)) == [end]
    stated = {**metadata, "tokenizer.ggml.eos_token_id": bos, "tokenizer.ggml.eot_token_id": 3}
    file = read_header(write_tokenizer(tmp_path / "t.gguf", stated))
    assert end_token_ids(file, read_vocabulary(file)) == sorted([3, bos, end])


def test_a_long_token_is_refused(tmp_path: Path) -> None:
    metadata = sentence_piece_metadata()
    metadata["tokenizer.ggml.tokens"][300] = "a" * (MAX_TOKEN_CHARS + 1)
    with pytest.raises(ConfigError, match=f"token 300 has {MAX_TOKEN_CHARS + 1} characters"):
        tokenizer_of(tmp_path, metadata)


def with_pieces(pieces: list[str]) -> dict[str, Any]:
    """Returns a tokenizer with these tokens, and those of SentencePiece that are not text."""
    metadata = sentence_piece_metadata()
    first = metadata["tokenizer.ggml.token_type"].index(1)
    added = {"tokens": pieces, "token_type": [1] * len(pieces), "scores": [-1.0] * len(pieces)}
    own = {f"tokenizer.ggml.{name}": values for name, values in added.items()}
    return {**metadata, **{name: metadata[name][:first] + values for name, values in own.items()}}


def test_merges_beyond_the_limit_are_refused(tmp_path: Path) -> None:
    """Each way to split one of these tokens is a merge."""
    one = MAX_TOKEN_CHARS * (MAX_TOKEN_CHARS - 1) // 2
    letters = [chr(ord("一") + letter) for letter in range(MAX_MERGES // one + 1)]
    runs = [letter * count for letter in letters for count in range(1, MAX_TOKEN_CHARS + 1)]
    with pytest.raises(ConfigError, match=f"more than {MAX_MERGES} ways to split"):
        tokenizer_of(tmp_path, with_pieces(runs))


def test_tokens_with_too_much_text_are_refused(tmp_path: Path) -> None:
    count = MAX_CUTS // MAX_TOKEN_CHARS + 1
    pieces = [f"{number:0{MAX_TOKEN_CHARS}}" for number in range(count)]
    with pytest.raises(ConfigError, match=f"characters; the limit is {MAX_CUTS}"):
        tokenizer_of(tmp_path, with_pieces(pieces))


def test_a_score_that_is_not_a_number_is_refused(tmp_path: Path) -> None:
    metadata = sentence_piece_metadata()
    metadata["tokenizer.ggml.scores"][300] = float("nan")
    with pytest.raises(ConfigError, match="scores of token 300 is not a number"):
        tokenizer_of(tmp_path, metadata)


def test_a_long_merge_is_refused_in_a_short_line(tmp_path: Path) -> None:
    metadata = byte_pair_metadata("gpt-2")
    metadata["tokenizer.ggml.merges"][3] = "x" * 10**6
    with pytest.raises(ConfigError, match="does not join two tokens") as found:
        tokenizer_of(tmp_path, metadata)
    assert len(str(found.value)) < 600


def test_a_tokenizer_without_bytes_and_unknown_token_is_refused(tmp_path: Path) -> None:
    metadata = sentence_piece_metadata()
    del metadata["tokenizer.ggml.unknown_token_id"]
    metadata["tokenizer.ggml.token_type"] = [1] * len(metadata["tokenizer.ggml.tokens"])
    with pytest.raises(ConfigError, match="neither an unknown token nor one token for each byte"):
        tokenizer_of(tmp_path, metadata)


@pytest.mark.parametrize("name", SPLITS)
def test_every_split_is_a_valid_expression(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, byte_pair_metadata(name))
    for line in LINES:
        tokenizer.encode(line)
