"""The perplexity of a text is that of transformers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from swell.cluster.local import LLM
from tests.benchmarks import quality
from tests.support.paths import ROOT

NANO = ROOT / "configs" / "models" / "nano"


def test_the_perplexity_of_a_text(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("upper: abcdef\nreverse: hello\n" * 5)
    with LLM(str(NANO), **{"model.dtype": "float32", **quality.MEMORY}) as llm:
        windows = quality.text_windows(llm, [file], 40)
        result = quality.quality_of_texts(llm, [file], 40)
        start = llm.get_tokenizer().encode("")
    assert len(windows) > 2 and max(map(len, windows)) == 40
    assert all(window[: len(start)] == start for window in windows)
    model = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32)
    begin = len(start) or 1
    losses: list[float] = []
    for window in windows:
        with torch.no_grad():
            log_probs = model(torch.tensor([window])).logits[0].double().log_softmax(1)
        losses += [-log_probs[i - 1, window[i]].item() for i in range(begin, len(window))]
    assert result["tokens"] == len(losses)
    perplexity = math.exp(sum(losses) / len(losses))
    assert result["perplexity"] == pytest.approx(perplexity, rel=1e-4)
