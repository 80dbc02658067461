"""Causal language models that rank pairs by the logits of two tokens, such as Qwen3-Reranker. The
scores equal those of transformers' own head."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from swell.cluster.local import LLM
from swell.cluster.text.errors import BadRequest
from swell.configs.schema import ConfigError
from tests.support.weights.pooled_models import FAMILIES, SIZES, TEXTS, save_tokenizer

pytestmark = pytest.mark.slow

TOLERANCE: dict[str, float] = {"rtol": 0, "atol": 1e-5}
NO, YES = "n", "y"
TEMPLATE = "judge: {query} of {document} ?"
BACKWARDS = "{document}, then {query}"


def make(folder: Path, family: str, **changes: Any) -> Any:
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **changes})
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder, family)
    return model


def serving(folder: Path, **settings: Any) -> LLM:
    tokens = {"model.classifier_tokens": [NO, YES]}
    return LLM(str(folder), **{**tokens, "cache.memory_bytes": 1 << 22, **settings})


@torch.no_grad()
def probability(folder: Path, model: Any, text: str) -> float:
    """Returns the probability of the token for yes, relative to the one for no, after a text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt").input_ids
    logits = model(ids).logits[0, -1]
    pair = logits[tokenizer.convert_tokens_to_ids([NO, YES])]
    return float(torch.softmax(pair, -1)[1])


@pytest.mark.parametrize(
    ("family", "changes", "settings"),
    [
        ("qwen3", {"tie_word_embeddings": True}, {}),
        ("qwen3", {"tie_word_embeddings": False}, {"parallel.tensor": 2}),
        ("llama", {"tie_word_embeddings": True}, {"parallel.pipeline": 3}),
        ("llama", {"tie_word_embeddings": False}, {"scheduler.max_tokens_per_step": 16}),
    ],
)
def test_scores_equal_those_of_transformers(
    tmp_path: Path, family: str, changes: dict[str, Any], settings: dict[str, Any]
) -> None:
    model = make(tmp_path, family, **changes)
    with serving(tmp_path, **settings) as llm:
        got = torch.tensor([one.outputs.probs[0] for one in llm.classify(TEXTS)])
    wanted = torch.tensor([probability(tmp_path, model, text) for text in TEXTS])
    torch.testing.assert_close(got, wanted, **TOLERANCE)
    assert wanted.max() - wanted.min() > 0.1


@pytest.mark.parametrize("template", [TEMPLATE, BACKWARDS])
def test_pairs_are_written_by_the_template(tmp_path: Path, template: str) -> None:
    """This includes texts that contain the names of the template's placeholders."""
    model = make(tmp_path, "qwen3")
    query = "what is {document}"
    documents = [*TEXTS, "it is {query}"]
    with serving(tmp_path, **{"model.pair_template": template}) as llm:
        got = torch.tensor([one.outputs.score for one in llm.score(query, documents)])
        with pytest.raises(BadRequest, match="truncate_prompt_tokens"):
            llm.score(query, documents, truncate_prompt_tokens=5)
    places = {"query": query}
    wanted = []
    for document in documents:
        places["document"] = document
        text = re.sub(r"\{(\w+)\}", lambda place: places[place[1]], template)
        wanted.append(probability(tmp_path, model, text))
    torch.testing.assert_close(got, torch.tensor(wanted), **TOLERANCE)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model.classifier_tokens": ["n", "maybe"]}, "'maybe' is not a token"),
        ({"model.pair_template": "{query} alone"}, "{query} and {document}"),
        ({"model.pair_template": "{query} {query} {document}"}, "{query} and {document}"),
    ],
)
def test_unsuitable_models_are_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    make(tmp_path, "qwen3")
    with pytest.raises(ConfigError, match=re.escape(reason)):
        serving(tmp_path, **settings)


def test_an_encoder_without_a_ranking_head_is_refused(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("bert", **SIZES)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, "bert")
    with pytest.raises(ConfigError, match="causal language models"):
        serving(tmp_path)
