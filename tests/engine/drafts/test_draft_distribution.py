"""Tokens that are sampled with drafts have the model's distribution, as transformers computes it: a
chi-square test over 20 000 answers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swell.cluster.text.params.sampling_params import SamplingParams
from tests.engine.drafts.test_draft_model import drafter_of
from tests.engine.engine_harness import NANO, engine

pytestmark = pytest.mark.slow

DRAWS, TOP_K, TOKENS, TEMPERATURE = 20_000, 4, 3, 2.5
PROMPT = [5, 6, 7, 80, 81]
DEVIATIONS = 3.72
"""A bound in standard deviations, which a normally distributed value exceeds once in 10 000 cases.
The seeds are fixed, so the test always has the same result."""
Answer = tuple[int, ...]
MODELS: dict[str, dict[str, Any]] = {
    "often right": {"path": NANO},
    "hardly ever right": {"path": NANO, "load_format": "dummy"},
}


@pytest.fixture(scope="module")
def reference() -> dict[Answer, float]:
    """Returns the probability of each answer."""
    model: Any = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32).eval()
    found: dict[Answer, float] = {(): 1.0}
    for _ in range(TOKENS):
        longer: dict[Answer, float] = {}
        for answer, likelihood in found.items():
            with torch.no_grad():
                logits = model(torch.tensor([[*PROMPT, *answer]])).logits[0, -1]
            values, tokens = logits.topk(TOP_K)
            shares = (values / TEMPERATURE).softmax(-1)
            for token, share in zip(tokens.tolist(), shares.tolist(), strict=True):
                longer[(*answer, token)] = likelihood * share
        found = longer
    return found


@pytest.mark.parametrize("name", MODELS)
def test_answers_have_the_distribution_of_the_model(
    name: str, reference: dict[Answer, float]
) -> None:
    found, drafts = draw(MODELS[name])
    assert is_likely(found, reference)
    flatter = {
        answer: (likelihood + 0.1 / len(reference)) / 1.1
        for answer, likelihood in reference.items()
    }
    assert not is_likely(found, flatter), "such a difference is seen"
    assert drafts > DRAWS / 2


def draw(small: dict[str, Any]) -> tuple[Counter[Answer], int]:
    """Returns the answers with drafts of a small model, and the number of drafts."""
    params = [
        SamplingParams(
            temperature=TEMPERATURE, top_k=TOP_K, seed=seed, max_tokens=TOKENS, ignore_eos=True
        )
        for seed in range(DRAWS)
    ]
    drafts = {"drafts__method": "model", "drafts__model": small, "drafts__max_step_tokens": 2048}
    room = {"scheduler__max_rows": 128, "cache__memory_bytes": 20_000_000}
    with engine(**drafts, **room) as llm:
        outputs = [
            output
            for first in range(0, DRAWS, 1000)
            for output in llm.generate([PROMPT] * 1000, params[first : first + 1000])
        ]
        num_drafts = drafter_of(llm).num_drafts
    return Counter(tuple(output.outputs[0].token_ids) for output in outputs), num_drafts


def is_likely(found: Counter[Answer], reference: dict[Answer, float]) -> bool:
    """Whether these counts of answers are likely under a distribution. The chi-square limit is the
    approximation of Wilson and Hilferty (1931)."""
    if not found.keys() <= reference.keys():
        return False
    often = {answer for answer, likelihood in reference.items() if likelihood * DRAWS >= 5}
    pairs = [(found[answer], reference[answer] * DRAWS) for answer in often]
    rest = DRAWS - sum(count for count, _ in pairs), DRAWS - sum(mean for _, mean in pairs)
    pairs += [rest] if rest[1] >= 5 else []
    distance = sum((count - mean) ** 2 / mean for count, mean in pairs)
    spread = 2 / (9 * (len(pairs) - 1))
    return distance < (len(pairs) - 1) * (1 - spread + DEVIATIONS * spread**0.5) ** 3
