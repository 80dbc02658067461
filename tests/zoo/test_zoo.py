"""One model for each kind of mechanism: equal to eager transformers, or refused at load.

All of them: `python -m tests.zoo`.
"""

from __future__ import annotations

import tempfile
import time
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import transformers

from tests.worker.quantization import writers
from tests.zoo import configs, formats, page
from tests.zoo.run import Case, Outcome, cases, run, run_in_subprocess

SPREAD = {
    # mechanism -> model types
    "plain": ["llama", "arcee", "olmo2", "stablelm", "internlm3"],
    "window in some layers": ["qwen2", "gemma2", "gemma3_text", "cohere2", "mistral", "olmo3"],
    "window that a keyword or the mask alone has": ["exaone4", "kolibri1", "phimoe"],
    "no rotation in some layers": ["smollm3"],
    "chunks": ["llama4_text"],
    "caps and factors": ["granite", "minicpm3", "nanochat"],
    "partial rotation": ["phi", "glm4", "nemotron"],
    "learned positions": ["gpt2", "opt", "biogpt"],
    "positions of tokens": ["roberta"],
    "parallel blocks": ["gpt_neox", "cohere"],
    "latent attention": ["deepseek_v3", "longcat_flash", "mistral4"],
    "logits of some tokens are masked": ["chameleon"],
    "matrices stored in parts": ["sarvam_moe"],
    "experts": ["mixtral", "qwen3_moe", "granitemoe"],
    "0-dim buffers": ["apertus"],
    "heads that read tokens, layers that share": ["gemma4_text", "gemma3n_text"],
    "queries and keys normed": ["qwen3"],
    "sinks": ["gpt_oss"],
    "attention of its own": ["bloom", "mpt", "falcon", "xglm"],
    "two attentions a layer": ["diffllama"],
    "sparse attention": ["deepseek_v32"],
    "recurrent states": ["mamba2", "rwkv", "jamba", "lfm2_moe"],
    "not causal, not alone": ["bart", "musicgen", "diffusion_gemma"],
    "text models of wrappers": ["gemma3", "mistral3", "qwen2_vl", "gemma3n", "llama4"],
}
KINDS = [kind for kinds in SPREAD.values() for kind in kinds if kind in configs.kinds()]
CASES = cases(KINDS)

pytestmark = pytest.mark.slow


@cache
def outcome(case: Case) -> Outcome:
    return run(case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_architecture_equals_transformers_or_is_refused(case: Case) -> None:
    found = outcome(case)
    assert found.status in ("equal", "refused"), found.note


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_agrees_with_the_results(kind: str) -> None:
    text = page.PAGE.read_text()
    if page.version_of(text) != transformers.__version__:
        pytest.skip(f"docs/reference/models.md is of transformers {page.version_of(text)}")
    written = page.rows_of(text)[kind]
    seen = page.row_of(kind, [outcome(case) for case in CASES if case.kind == kind])
    assert (written.architecture, written.native, written.generic, written.why) == (
        seen.architecture,
        seen.native,
        seen.generic,
        seen.why,
    )


def test_a_terminated_case_leaves_no_files(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("tests.zoo.run._try", lambda *_: time.sleep(600))
    found = run_in_subprocess(Case("llama", "", "native"), deadline_s=0.5)
    assert found.status == "failed" and list(tmp_path.iterdir()) == []


def test_the_page_has_every_model() -> None:
    text = page.PAGE.read_text()
    if page.version_of(text) != transformers.__version__:
        pytest.skip(f"docs/reference/models.md is of transformers {page.version_of(text)}")
    assert sorted(page.rows_of(text)) == configs.kinds()
    assert "FAILED" not in text


def test_the_page_of_formats_has_every_format_and_no_failure() -> None:
    cells = formats.cells_of(formats.PAGE.read_text())
    assert set(cells) == set(product(writers.FORMATS, formats.FAMILIES))
    assert set(cells.values()) <= {"native, generic", "generic", "native", "no"}


@pytest.mark.parametrize(("form", "family"), [("gptq", "gemma3"), ("ct-w4a16", "olmo2")])
def test_the_page_of_formats_agrees_with_the_results(form: str, family: str) -> None:
    written = formats.cells_of(formats.PAGE.read_text())[form, family]
    assert formats.outcome(form, family) == written
