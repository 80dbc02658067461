"""The texts and end tokens of a worker's vocabulary equal those that an ingress uses."""

from __future__ import annotations

import json
import random
import re
import shutil

import numpy as np
import pytest
import torch

from swell.cluster.text.grammar.structured_output import compile_grammar
from swell.cluster.text.params.sampling_params import StructuredOutputs
from swell.cluster.text.tokens.detokenizer import Detokenizer
from swell.cluster.text.tokens.token_texts import TokenTexts
from swell.cluster.text.tokens.tokenizer import load_eos_token_ids, load_tokenizer
from swell.worker.sample.vocabulary import load_vocabulary
from tests.model_kinds import MODEL_KINDS, model_kind
from tests.worker.sample.test_grammar import END, NANO, TOKENIZER, Answers, lark

pytestmark = pytest.mark.slow


def test_every_token_spells_what_the_tokenizer_decodes():
    vocabulary = load_vocabulary(str(NANO))
    for token in range(255):  # 255 is not a byte of UTF-8; the library marks special tokens with it
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
        ({}, {}, {260}),  # the end token of config.json
        ({"eos_token_id": [260, 99_999]}, {}, {260}),
    ],
)
def test_every_end_token_of_the_model_finishes_an_answer(folder, generation, tokenizer, ends):
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    answers = Answers(str(folder))
    answers.take(0, lark(choice=["a"]))
    answers.step([0])
    logits, batch = answers.logits([0]), answers.batch([0])
    answers.sampler(logits, batch)
    assert set(np.flatnonzero(torch.isfinite(logits[0]))) == ends
    assert ends <= set(load_eos_token_ids(str(folder), load_tokenizer(str(folder))))


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


def walked(name, lark, seed=0):
    """Returns the ids and the text of a random sentence of a grammar, as a client sees it."""
    from llguidance import LLMatcher

    vocabulary, ends = (
        load_vocabulary(str(model_kind(name).folder())),
        set(model_kind(name).end_ids),
    )
    matcher, rng, ids = LLMatcher(vocabulary, lark, log_level=0), random.Random(seed), []
    for _ in range(2000):
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        assert allowed, matcher.get_error()
        token = rng.choice(allowed)
        if token in ends:
            return ids, model_kind(name).tokenizer.decode(ids, skip_special_tokens=True)
        assert matcher.consume_token(token), matcher.get_error()
        ids.append(token)
    raise AssertionError("no end")


@pytest.mark.parametrize("name", MODEL_KINDS)
def test_grammars_see_the_text_that_clients_see(name):
    tokenizer = model_kind(name).tokenizer
    vocabulary = load_vocabulary(str(model_kind(name).folder()))
    texts = TokenTexts(Detokenizer(tokenizer))
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    for token in range(len(tokenizer)):
        if texts[token] == b"\xff":
            continue  # 255 is not a byte of UTF-8; the library marks special tokens with it
        assert vocabulary.is_special_token(token) == (token in special)
        if token not in special:
            assert vocabulary.decode_bytes([token]) == texts[token]


PATTERN = "a?<think>[bc]{2}</think>|<.im_end.>y"


@pytest.mark.parametrize("name", MODEL_KINDS)
def test_names_of_added_tokens_are_texts_like_others(name):
    """Names of added tokens are ordinary text in a choice, an expression and a schema; as the only
    continuation, and as one of several."""
    tokenizer = model_kind(name).tokenizer
    names = [str(token) for token in tokenizer.added_tokens_decoder.values()] + ["<think>"]
    forced = compile_grammar(StructuredOutputs(choice=["".join(f"x{text}" for text in names)]))
    assert walked(name, forced.lark)[1] == "".join(f"x{text}" for text in names)
    chosen = compile_grammar(StructuredOutputs(choice=names)).lark
    assert {walked(name, chosen, seed)[1] for seed in range(8)} <= set(names)
    schema = {
        "type": "object",
        "properties": {
            names[-1]: {"const": names[0]},
            "one": {"enum": names},
            "like": {"type": "string", "pattern": "^(<think>|<.im_end.>)$"},
        },
        "required": [names[-1], "one", "like"],
        "additionalProperties": False,
    }
    for seed in range(3):
        _, text = walked(name, compile_grammar(StructuredOutputs(json=schema)).lark, seed)
        answer = json.loads(text)
        assert answer[names[-1]] == names[0] and answer["one"] in names
        pattern = compile_grammar(StructuredOutputs(regex=PATTERN))
        _, text = walked(name, pattern.lark, seed)
        assert re.fullmatch(PATTERN, text)


@pytest.mark.parametrize(
    "name", [n for n in MODEL_KINDS if "<think>" in model_kind(n).tokenizer.get_vocab()]
)
def test_an_added_token_and_its_characters_both_write_its_name(name):
    tokenizer = model_kind(name).tokenizer
    lark = compile_grammar(StructuredOutputs(regex="a?<think>b?")).lark
    marker = tokenizer.convert_tokens_to_ids("<think>")
    written = {marker in walked(name, lark, seed)[0] for seed in range(40)}
    assert written == {False, True}
