"""Bad words as token sequences, for tokenizers of every family."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from swell.cluster.text.params.sampling_params import BadRequest
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
    """The reference: vLLM's rule, word by word, and in addition the form after a newline."""
    found: list[list[int]] = []
    for word in words:
        forms = [
            backend.encode(space + word.lstrip(), add_special_tokens=False).ids
            for space in ("", " ")
        ]
        before = backend.encode("\n", add_special_tokens=False).ids
        whole = backend.encode("\n" + word.lstrip(), add_special_tokens=False).ids
        bare = whole[len(before) :] if whole[: len(before)] == before else []
        if forms[1][0] == forms[0][0] or len(forms[1]) != len(forms[0]):
            del forms[1]
        if bare:
            forms = [form for form in forms if form[-len(bare) :] != bare] + [bare]
        found += [form for form in forms if form not in found]
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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wrap", [Wrapped, Slow])
def test_token_ids_of_bad_words_follow_the_definition(family: str, wrap: Any) -> None:
    backend = FAMILIES[family]()
    assert bad_words_token_ids(wrap(backend), WORDS) == by_definition(backend, WORDS)


def test_a_word_is_found_at_the_beginning_and_after_a_space() -> None:
    """For words with the same number of tokens in both positions, the tokens of any text with the
    word contain one of the sequences."""
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
    ("spaced", "counts"),
    [
        ([3, 2], True),
        ([3, 4], True),
        ([1, 4], False),
        ([3, 1, 2], False),
        ([3], False),
        ([], False),
    ],
)
def test_the_second_form_counts_if_it_has_the_same_length(spaced: list[int], counts: bool) -> None:
    """The second form counts if it is as long as the first form [1, 2] and begins with another
    token."""
    forms = {"x": [1, 2], " x": spaced, "\n": [9], "\nx": [9, 1, 2]}

    class Table:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            return forms[text]

    assert bad_words_token_ids(Table(), ["x"]) == ([spaced, [1, 2]] if counts else [[1, 2]])


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
