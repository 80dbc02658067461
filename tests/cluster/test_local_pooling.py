"""`LLM.embed`, `classify` and `score`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from swell.cluster.local import LLM
from swell.cluster.text.errors import BadRequest
from tests.support.weights.pooled_models import TEXTS, make, pooled

pytestmark = pytest.mark.slow

NANO = Path(__file__).resolve().parents[2] / "configs" / "models" / "nano"
SMALL = {"cache.memory_bytes": 10_000_000}
TOLERANCE = {"rtol": 0, "atol": 1e-5}


def test_embeddings_and_their_scores(tmp_path):
    model = make(tmp_path, "qwen3", modes={"pooling_mode": "lasttoken"}, normalizes=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = [tokenizer.encode(text) for text in TEXTS]
    wanted = torch.stack([pooled(model, "last", one) for one in ids])
    wanted = torch.nn.functional.normalize(wanted, dim=-1)
    with LLM(str(tmp_path), **SMALL) as llm:
        answers = llm.embed(TEXTS)
        assert [one.prompt_token_ids for one in answers] == ids
        got = torch.tensor([one.outputs.embedding for one in answers])
        torch.testing.assert_close(got, wanted, **TOLERANCE)
        by_ids = torch.tensor([one.outputs.embedding for one in llm.embed(ids)])
        torch.testing.assert_close(by_ids, wanted, **TOLERANCE)
        (short,) = llm.embed(TEXTS[1], dimensions=8)
        assert short.outputs.hidden_size == 8
        (cut,) = llm.embed("a b c d e f", truncate_prompt_tokens=3)
        assert len(cut.prompt_token_ids) == 3
        scores = torch.tensor([one.outputs.score for one in llm.score(TEXTS[0], TEXTS)])
        torch.testing.assert_close(scores, wanted @ wanted[0], **TOLERANCE)
        with pytest.raises(BadRequest, match="generates no text"):
            llm.generate("a")
        with pytest.raises(BadRequest, match="returns embeddings and has no classes"):
            llm.classify("a")
        with pytest.raises(BadRequest, match=r"151 tokens in prompt\[1\]"):
            llm.embed(["a", "b" * 150])
        with pytest.raises(ValueError, match="data_1 has 2 texts and data_2 has 3"):
            llm.score(["a", "b"], ["c", "d", "e"])
        llm.check_idle()


@torch.no_grad()
def test_classes_and_scores_of_pairs(tmp_path):
    model = make(tmp_path, "bert", head="ForSequenceClassification", num_labels=1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    with LLM(str(tmp_path), **SMALL) as llm:
        scores = torch.tensor([one.outputs.score for one in llm.score("a b", TEXTS)])
        probs = [one.outputs.probs for one in llm.classify(TEXTS)]
        llm.check_idle()
    for text, score, one in zip(TEXTS, scores, probs, strict=True):
        pair = tokenizer("a b", text, return_tensors="pt")
        torch.testing.assert_close(score, torch.sigmoid(model(**pair).logits)[0, 0], **TOLERANCE)
        single = model(**tokenizer(text, return_tensors="pt")).logits
        torch.testing.assert_close(torch.tensor(one), torch.sigmoid(single)[0], **TOLERANCE)


def test_a_generating_model_pools_only_if_configured():
    with LLM(str(NANO), **SMALL) as llm, pytest.raises(BadRequest, match=r"model\.runner=pooling"):
        llm.embed("abc")
    with LLM(str(NANO), **{**SMALL, "model.runner": "pooling"}) as llm:
        (answer,) = llm.embed("abc")
        length = torch.tensor(answer.outputs.embedding).norm()
        torch.testing.assert_close(length, torch.tensor(1.0))
