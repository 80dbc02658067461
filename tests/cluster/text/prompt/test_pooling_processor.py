"""Pooling requests become activations, prompts and pairs."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from swell.cluster.api.pooling import convert
from swell.cluster.api.pooling.protocol import RerankRequest, ScoreRequest
from swell.cluster.text.params.sampling_params import BadRequest
from swell.cluster.text.prompt.pooling_processor import (
    PoolingProcessor,
    PoolingRequest,
    generation_refusal,
    kept_of_each,
)
from swell.cluster.text.prompt.prompts import PromptProcessor
from swell.cluster.text.prompt.truncation import TokenizeOptions, Truncation
from swell.configs.pooling import PoolingSpec
from swell.worker.sampler_wire import Activation
from tests.support.pooled_models import VOCABULARY, save_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder, "bert")
    return transformers.AutoTokenizer.from_pretrained(folder)


def processor(tokenizer: Any, **values: Any) -> PoolingProcessor:
    spec = PoolingSpec(
        **{"family": "Bert", "task": "embed", "method": "cls", "hidden_size": 64, **values}
    )
    prompts = PromptProcessor(tokenizer, 50, len(VOCABULARY), "m", min_answer_tokens=0)
    return PoolingProcessor(prompts, spec)


def request(task: str, *inputs: Any, **values: Any) -> PoolingRequest:
    return PoolingRequest(task=task, inputs=inputs, fields=["input"] * len(inputs), **values)


@pytest.mark.parametrize(
    ("known", "default", "input_type", "prefix"),
    [
        ({"query": "q ", "document": "d "}, None, "search_query", "q "),
        ({"query": "q ", "passage": "p "}, None, "document", "p "),
        ({"query": "q ", "Clustering": "c "}, None, "CLUSTERING", "c "),
        ({"query": "q "}, None, "passage", ""),
        ({"query": "q "}, "query", "passage", "q "),
        ({}, None, "query", ""),
    ],
)
def test_an_input_type_selects_the_prompt_of_the_model(
    tokenizer: Any, known: dict[str, str], default: str | None, input_type: str, prefix: str
) -> None:
    made = processor(tokenizer, prompts=known, default_prompt=default)
    (got,) = made.process(request("embed", "a b", input_type=input_type)).requests
    (want,) = processor(tokenizer).process(request("embed", f"{prefix}a b")).requests
    assert got.prompt_token_ids == want.prompt_token_ids


CLASSES = {"task": "classify", "labels": ("a", "b", "c")}
ONE = {"task": "classify", "labels": ("a",)}


@pytest.mark.parametrize(
    ("spec", "task", "activates", "activation"),
    [
        ({}, "embed", None, Activation.NONE),
        ({}, "embed", True, Activation.NORMALIZE),
        ({"normalize": True}, "embed", None, Activation.NORMALIZE),
        ({"normalize": True}, "embed", False, Activation.NONE),
        ({}, "score", None, Activation.NORMALIZE),
        (CLASSES, "classify", None, Activation.SOFTMAX),
        (CLASSES, "classify", False, Activation.NONE),
        (
            {**CLASSES, "problem": "multi_label_classification"},
            "classify",
            None,
            Activation.SIGMOID,
        ),
        ({**CLASSES, "problem": "regression"}, "classify", None, Activation.NONE),
        (ONE, "classify", None, Activation.SIGMOID),
        (ONE, "score", None, Activation.SIGMOID),
        ({**ONE, "score_activation": "Identity"}, "score", None, Activation.NONE),
        ({**ONE, "score_activation": "Identity"}, "classify", None, Activation.SIGMOID),
    ],
)
def test_activations_follow_the_request_and_the_model(tokenizer, spec, task, activates, activation):
    params = processor(tokenizer, **spec).process(request(task, "a", activates=activates))
    (sent,) = params.requests
    assert sent.sampler.pooling is not None and sent.sampler.pooling.activation is activation


@pytest.mark.parametrize("method", ["cls", "mean", "last"])
def test_only_last_token_pooling_uses_the_prefix_cache(tokenizer, method):
    made = processor(tokenizer, method=method)
    (sent,) = made.process(request("embed", "a")).requests
    assert sent.skip_prefix_cache == (method != "last")
    assert sent.max_tokens == 0


def test_prompts_and_lower_case(tokenizer):
    ids = tokenizer.encode
    made = processor(tokenizer, prompts={"query": "q: ", "none": ""}, default_prompt="query")
    texts = [p.prompt_token_ids for p in made.process(request("embed", "a b", [7, 8])).requests]
    assert texts == [ids("q: a b"), [7, 8]], "token ids are taken as they are"
    (prompt,) = made.process(request("embed", "a b", prompt_name="none")).requests
    assert prompt.prompt_token_ids == ids("a b")
    lower = processor(tokenizer, prompts={"query": "Q: "}, lower_case=True)
    (prompt,) = lower.process(request("embed", "A B", prompt_name="query")).requests
    assert prompt.prompt_token_ids == ids("q: a b")
    with pytest.raises(
        BadRequest,
        match=r"prompt_name='x' is not .*available: 'query', 'none'",
    ):
        made.process(request("embed", "a", prompt_name="x"))


@pytest.mark.parametrize("room", [None, 7, 10, 12])
@pytest.mark.parametrize(
    "pair", [("a b c", "d"), ("a", "b c d e f g h i"), ("a b c d e f", "g h i j k")]
)
def test_a_pair_is_encoded_as_by_its_tokenizer(tokenizer, room, pair):
    made = processor(tokenizer, **ONE)
    cut = None if room is None else Truncation(room, "right", 0)
    options = TokenizeOptions(True, cut)
    (prompt,) = made.process(request("score", pair, tokenize_options=options)).requests
    limit = {} if room is None else {"truncation": "longest_first", "max_length": room}
    right = tokenizer(*pair, **limit)
    assert prompt.prompt_token_ids == right["input_ids"]
    pooling = prompt.sampler.pooling
    assert pooling is not None
    assert pooling.segment_start == right["token_type_ids"].index(1)


@pytest.mark.parametrize(
    ("values", "can"),
    [({}, False), ({"family": "Qwen3"}, True), ({"family": "Qwen3", **ONE}, False)],
)
def test_a_refusal_advises_what_the_model_can_do(tokenizer, values, can):
    message = str(generation_refusal(processor(tokenizer, **values).spec))
    assert ("model.runner=generate" in message) == can


LONG = "a " * 9999
PAIRS = [
    (convert.rerank_pairs, RerankRequest(query=LONG, documents=["a", "b"]), "query"),
    (convert.rerank_pairs, RerankRequest(query="a", documents=["a", LONG]), "documents[1]"),
    (convert.score_pairs, ScoreRequest(text_1=["a", LONG], text_2=["a", "b"]), "text_1[1]"),
    (convert.score_pairs, ScoreRequest(text_1=LONG, text_2=["a", "b"]), "text_1"),
    (convert.score_pairs, ScoreRequest(queries="a", documents=[LONG, "b"]), "documents[0]"),
]


@pytest.mark.parametrize(("read", "body", "field"), PAIRS)
@pytest.mark.parametrize("embeds", [False, True])
def test_an_error_of_a_pair_names_the_text_that_is_wrong(
    tokenizer: Any, read: Any, body: Any, field: str, embeds: bool
) -> None:
    asked = convert.score_request(body, read(body), embeds=embeds)
    with pytest.raises(BadRequest) as caught:
        processor(tokenizer, **({} if embeds else ONE)).process(asked)
    assert caught.value.param == field and field in str(caught.value)


@given(first=st.integers(1, 12), second=st.integers(1, 12), room=st.integers(2, 20))
def test_the_longer_text_is_cut_first(first, second, room):
    backend = Tokenizer.from_str(_WORDS)
    backend.enable_truncation(room, strategy="longest_first")
    ids = backend.encode(" ".join("a" * first), " ".join("b" * second)).ids
    assert kept_of_each([first, second], room) == [ids.count(0), ids.count(1)]
    assert kept_of_each([first], room) == [min(first, room)]


_WORDS = """{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
"normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null,
"decoder": null, "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}"""
