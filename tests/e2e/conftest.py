from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache

import pytest

from tests.e2e.cluster import NANO


@pytest.fixture(scope="session")
def heldout() -> list[dict]:
    lines = (NANO / "heldout.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="session")
def truth():
    """(prompt, max_tokens) -> ids and text of the greedy answer of transformers with nano."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(NANO)

    @cache
    def answer(prompt: str, max_tokens: int) -> tuple[list[int], str]:
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        out = model.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=max_tokens, pad_token_id=0
        )[0, len(ids) :].tolist()
        return out, tokenizer.decode(out, skip_special_tokens=True)

    return answer


@pytest.fixture(autouse=True)
def _idle(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checks after each test that all blocks and slots are free."""
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").wait_idle()
