"""A model's tokens as texts, and its ends, as the edge of the cluster knows them."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from swell.cluster.prompt import end_token_ids, load_tokenizer
from swell.worker.sample.vocabulary import load_vocabulary
from tests.worker.test_grammar import END, NANO, TOKENIZER, Answers, lark


def test_every_token_spells_what_the_tokenizer_says():
    vocabulary = load_vocabulary(str(NANO))
    for token in range(255):  # 255 is no byte of UTF-8, and the library's mark of special tokens
        assert vocabulary.decode_bytes([token]) == bytes([token])
    for written in ("Grüße 🍀\n", '{"a": [1, 2]}'):
        assert vocabulary.decode_str(TOKENIZER.encode(written).ids) == written
    assert all(vocabulary.is_special_token(token) for token in range(256, 262))


ADDED = {"__type": "AddedToken", "content": "<|assistant|>"}


@pytest.fixture
def folder(tmp_path):
    for file in NANO.glob("*.json"):
        shutil.copy(file, tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("generation", "tokenizer", "ends"),
    [
        ({"eos_token_id": [259, 258]}, {"eos_token": "<|end|>"}, {258, 259, 260}),
        (
            {"eos_token_id": 258},
            {"eos_token": {"__type": "AddedToken", "content": "<|assistant|>"}},
            {258, 259},
        ),
        ({}, {}, {260}),  # config.json's
        ({"eos_token_id": [260, 99_999]}, {}, {260}),
    ],
)
def test_all_ends_of_the_model_end_an_answer(folder, generation, tokenizer, ends):
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    answers = Answers(str(folder))
    answers.take(0, lark(choice=["a"]))
    answers.step([0])
    logits, batch = answers.logits([0]), answers.batch([0])
    answers.sampler(logits, batch)
    assert set(np.flatnonzero(torch.isfinite(logits[0]))) == ends
    assert ends <= set(end_token_ids(str(folder), load_tokenizer(str(folder))))


def test_a_tokenizer_of_an_older_format_is_converted(folder):
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>"})
    )
    vocab = {**model["vocab"], "<|end|>": END}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    vocabulary = load_vocabulary(str(folder))
    assert vocabulary.decode_bytes([65, 195]) == b"A\xc3"
    assert vocabulary.eos_tokens == [END]


def test_ids_may_have_gaps(folder):
    file = folder / "tokenizer.json"
    data = json.loads(file.read_text())
    data["added_tokens"] = []
    data["model"]["vocab"] |= {"<|end|>": END, "xy": 300}
    file.write_text(json.dumps(data))
    vocabulary = load_vocabulary(str(folder))
    assert vocabulary.vocab_size == 301 and vocabulary.eos_tokens == [END]
    assert vocabulary.decode_bytes([65, 300]) == b"Axy"
    answers = Answers(str(folder))
    answers.take(0, lark(regex="(?s:.)*"))
    batch, logits = answers.batch([0]), torch.zeros(1, 320)
    answers.sampler(logits, batch)
    assert set(np.flatnonzero(torch.isfinite(logits[0, 256:]))) == {END - 256, 300 - 256}
