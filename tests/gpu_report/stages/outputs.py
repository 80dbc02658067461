"""Greedy answers of small models equal those of transformers in float32: captured and eager, with
one and three steps in flight. In bfloat16 these four have the same answers."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.gpu_report.engines import Swell
from tests.gpu_report.scale import Figures, Scale
from tests.worker import tiny_models

KINDS = ("llama", "qwen3", "mistral", "qwen3_moe")
PROMPTS = [[5, 6, 7], list(range(20, 61)), [9], list(range(100, 117))]
NEW_TOKENS = 24


def run(scale: Scale) -> Figures:
    figures: Figures = {}
    for kind in KINDS if scale.is_full else KINDS[:1]:
        with tempfile.TemporaryDirectory(prefix="swell-gpu-") as name:
            folder = Path(name)
            tiny_models.make(folder, kind)
            expected = {"float32": _transformers_tokens(folder, scale.device)}
            for dtype in ("float32", "bfloat16"):
                for eager, depth in itertools.product((False, True), (1, 3)):
                    settings = {
                        "model__dtype": dtype,
                        "model__enforce_eager": eager,
                        "scheduler__steps_in_flight": depth,
                    }
                    found = _tokens(folder, scale, settings)
                    wanted = expected.setdefault(dtype, found)
                    assert found == wanted, (kind, settings, found, wanted)
        figures[kind] = "equal"
    return figures


def _tokens(folder: Path, scale: Scale, settings: dict[str, Any]) -> list[list[int]]:
    with Swell(folder, scale, cache__memory_bytes=8 << 20, **settings) as engine:
        return engine.generate(PROMPTS, NEW_TOKENS)


@torch.inference_mode()
def _transformers_tokens(folder: Path, device: str) -> list[list[int]]:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model.eval().to(device)
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device=device)
        out = model.generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0)
        answers.append(out[0, len(prompt) :].tolist())
    return answers
