"""Bad words as token sequences, for tokenizers of every family."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from swell.cluster.text.errors import BadRequest
from swell.cluster.text.tokens import bad_words as words
from tests.cluster.text.tokenizers_for_tests import EXACT, WINDOWED, chat_tokenizer
from tests.model_kinds import model_kind

FAMILIES = {**EXACT, **WINDOWED}
bad_words_token_ids = partial(words.bad_words_token_ids, vocab_size=10**9)
WORDS = ["dog", " fox", "  the", "quick brown", "12:45", "it's", "苹果", "straße"]


class Wrapped:
    """A tokenizer as transformers wraps it."""

    def __init__(self, backend: Any) -> None:
        self.backend_tokenizer = backend


class Slow:
    """A tokenizer without a Rust backend."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)


def by_definition(backend: Any, words: list[str]) -> list[list[int]]:
    """The reference: the tokens of each word at the beginning of a text, after a space and after a
    line end, without those that end with others of the word."""
    found: list[list[int]] = []
    for word in words:
        plain, spaced, line, before = (
            backend.encode(text, add_special_tokens=False).ids
            for text in (word.lstrip(), " " + word.lstrip(), "\n" + word.lstrip(), "\n")
        )
        bare = line[len(before) :] if line[: len(before)] == before else []
        forms = {tuple(form): None for form in sorted([plain, spaced, bare], key=len) if form}
        for form in forms:
            if not any(form != other and form[-len(other) :] == other for other in forms):
                found += [list(form)] if list(form) not in found else []
    return found


@pytest.mark.parametrize("name", ["llama2", "mistral_v3", "phi3", "gemma", "llama3", "qwen3"])
@pytest.mark.parametrize("before", ["", " ", "a ", "\n", "a\n", "(", "x="])
def test_a_word_is_found_at_any_position(name: str, before: str) -> None:
    """This holds for tokenizers with and without a prefix space."""
    tokenizer = model_kind(name).tokenizer
    for word in ("the", "Paris"):
        sequences = bad_words_token_ids(tokenizer, [word])
        ids = tokenizer.encode(before + word, add_special_tokens=False)
        assert any(ids[-len(sequence) :] == sequence for sequence in sequences)


def shortened_by_a_space(tokenizer: Any) -> list[str]:
    """Returns words that have fewer tokens after a space than at the beginning of a text."""
    texts = [tokenizer.decode([id]) for id in range(len(tokenizer))]
    words = [text[1:] for text in texts if text.startswith(" ") and text[1:].isalpha()]
    return [word for word in words if len(tokenizer.encode(word, add_special_tokens=False)) > 1]


@pytest.mark.parametrize("name", ["gemma", "llama3", "qwen3"])
@pytest.mark.parametrize("before", ["", " ", "a ", "\n", "a\n"])
def test_a_word_that_a_space_shortens_is_found(name: str, before: str) -> None:
    tokenizer = model_kind(name).tokenizer
    found = shortened_by_a_space(tokenizer)
    assert len(found) > 10
    for word in found:
        sequences = bad_words_token_ids(tokenizer, [word])
        ids = tokenizer.encode(before + word, add_special_tokens=False)
        assert any(ids[-len(sequence) :] == sequence for sequence in sequences), word


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wrap", [Wrapped, Slow])
def test_token_ids_of_bad_words_follow_the_definition(family: str, wrap: Any) -> None:
    backend = FAMILIES[family]()
    assert bad_words_token_ids(wrap(backend), WORDS) == by_definition(backend, WORDS)


def test_a_word_is_found_at_the_beginning_and_after_a_space() -> None:
    """The tokens of any text with the word contain one of the sequences."""
    backend = FAMILIES["byte_level"]()
    for word in ("the", "dog", "isn't"):
        banned = bad_words_token_ids(Wrapped(backend), [word])
        for text in (word, " " + word, f"a {word}"):
            ids = backend.encode(text, add_special_tokens=False).ids
            assert any(
                ids[i : i + len(tokens)] == tokens
                for tokens in banned
                for i in range(len(ids) - len(tokens) + 1)
            ), (word, text)


def test_a_word_has_two_forms_if_the_space_belongs_to_the_token() -> None:
    tokenizer = chat_tokenizer()
    plain = tokenizer.encode("the", add_special_tokens=False)
    spaced = tokenizer.encode(" the", add_special_tokens=False)
    assert len(plain) == len(spaced) == 1
    assert sorted(bad_words_token_ids(tokenizer, ["the"])) == sorted([plain, spaced])


@pytest.mark.parametrize(
    ("spaced", "forms"),
    [
        ([3, 4], [[1, 2], [3, 4]]),
        ([3], [[3], [1, 2]]),
        ([5, 6, 7], [[1, 2], [5, 6, 7]]),
        ([3, 1, 2], [[1, 2]]),
        ([2], [[2]]),
        ([], [[1, 2]]),
    ],
)
def test_a_form_counts_unless_it_ends_with_a_shorter_one(
    spaced: list[int], forms: list[list[int]]
) -> None:
    ids = {"x": [1, 2], " x": spaced, "\n": [9], "\nx": [9, 1, 2]}

    class Table:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            return ids[text]

    assert bad_words_token_ids(Table(), ["x"]) == forms


def test_forms_contain_no_special_tokens_and_no_duplicates() -> None:
    backend = FAMILIES["llama2"]()
    assert backend.encode("the").ids[0] == 1
    assert all(1 not in tokens for tokens in bad_words_token_ids(Wrapped(backend), WORDS))
    once = bad_words_token_ids(Wrapped(backend), ["the"])
    assert bad_words_token_ids(Wrapped(backend), ["the", " the", "the"]) == once
    assert bad_words_token_ids(Wrapped(backend), []) == []


@pytest.mark.parametrize(
    ("word", "error"),
    [(" \n ", r"bad_words\[1\]=' \\n ' has no token.*logit_bias"), ("\ud800", "lone surrogate")],
)
def test_an_invalid_word_is_refused_by_its_index(word: str, error: str) -> None:
    with pytest.raises(BadRequest, match=error) as refusal:
        bad_words_token_ids(chat_tokenizer(), ["the", word])
    assert refusal.value.param == "bad_words[1]"


def test_more_tokens_than_an_engine_accepts_are_refused() -> None:
    tokenizer = model_kind("llama2").tokenizer
    assert len(bad_words_token_ids(tokenizer, ["😃" * 16_000])) == 1
    with pytest.raises(BadRequest, match=r"bad_words have \d+ tokens.*65536") as refusal:
        bad_words_token_ids(tokenizer, ["😃" * 16_000, "sky" + "😃" * 1000])
    assert refusal.value.param == "bad_words"


def test_tokens_that_the_model_cannot_sample_need_no_ban() -> None:
    """A tokenizer may have more tokens than its model."""
    backend = FAMILIES["byte_level"]()
    every = bad_words_token_ids(Wrapped(backend), WORDS)
    largest = max(map(max, every))
    left = words.bad_words_token_ids(Wrapped(backend), WORDS, vocab_size=largest)
    assert left == [tokens for tokens in every if largest not in tokens] != every
