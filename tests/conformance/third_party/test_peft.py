"""Adapters that PEFT has created and saved, loaded over HTTP while the server runs; PEFT's own
forward pass is the reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import peft
import pytest
import torch
from conftest import NANO, serve
from transformers import AutoModelForCausalLM

from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

PROMPTS = [[(7 * i + 3 * length) % 90 + 3 for i in range(length)] for length in (3, 17, 40)]
TOKENS = 12
KINDS: dict[str, dict[str, Any]] = {
    "all-linear": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    "attention": {"r": 3, "lora_alpha": 9, "target_modules": ["q_proj", "v_proj"]},
    "pattern": {"r": 4, "lora_alpha": 4, "target_modules": r".*\.(up|down)_proj"},
    "ranks": {
        "r": 5,
        "lora_alpha": 7,
        "target_modules": ["q_proj", "k_proj", "o_proj", "gate_proj"],
        "rank_pattern": {"k_proj": 2},
        "alpha_pattern": {"gate_proj": 3.5},
        "use_rslora": True,
    },
}


class Judged:
    """Adapters as PEFT saves them, and the tokens that it generates with each."""

    def __init__(self, top: Path) -> None:
        self.folders: dict[str, Path] = {}
        self.expected: dict[str, list[list[int]]] = {}
        for seed, (name, kind) in enumerate(KINDS.items()):
            torch.manual_seed(seed)
            base = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32)
            settings = peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **kind)
            model = peft.get_peft_model(base, settings).eval()
            self.folders[name] = top / name
            model.save_pretrained(top / name)
            self.expected[name] = [greedy(model, prompt) for prompt in PROMPTS]


@torch.no_grad()
def greedy(model: Any, prompt: list[int]) -> list[int]:
    out = model.generate(
        input_ids=torch.tensor([prompt]),
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    return Judged(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """Yields a client of a server with two workers per engine and fewer slots than adapters."""
    settings = ("lora.enabled=true", "lora.max_adapters=2", "parallel.tensor=2")
    with serve(NANO, *settings) as url, httpx.Client(base_url=url, timeout=HANG_S) as client:
        yield client


def test_answers_equal_those_of_peft(client: httpx.Client, judged: Judged) -> None:
    for name, folder in judged.folders.items():
        loading = {"lora_name": name, "lora_path": str(folder)}
        answer = client.post("/v1/load_lora_adapter", json=loading)
        assert answer.status_code == 200, answer.text
    cards = {card["id"]: card.get("parent") for card in client.get("/v1/models").json()["data"]}
    assert cards == {"nano": None, **dict.fromkeys(KINDS, "nano")}
    assert len({str(one) for one in judged.expected.values()}) == len(KINDS), "all differ"
    for name, expected in judged.expected.items():
        body = {
            "model": name,
            "prompt": PROMPTS,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert [one["token_ids"] for one in answer.json()["choices"]] == expected, name
    for name in KINDS:
        answer = client.post("/v1/unload_lora_adapter", json={"lora_name": name})
        assert answer.status_code == 200, answer.text
    assert len(client.get("/v1/models").json()["data"]) == 1
