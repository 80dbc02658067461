"""lm-eval's `local-completions` on a task of our own, for each way to compute tokens: log
likelihoods are those of transformers, and generated texts are those that nano was trained for."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import lm_eval
import pytest
from conftest import serve
from lm_eval.api.task import ConfigurableTask

from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

WORDS = Path(__file__).parent / "tasks" / "words.jsonl"
SOURCE = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(WORDS)}},
    "test_split": "test",
    "doc_to_text": "{{q}}",
}
CHOICE = {
    **SOURCE,
    "task": "choice",
    "output_type": "multiple_choice",
    "doc_to_choice": "choices",
    "doc_to_target": "gold",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}
WRITE = {
    **SOURCE,
    "task": "write",
    "output_type": "generate_until",
    "doc_to_target": "answer",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "temperature": 0},
    "metric_list": [{"metric": "exact_match"}],
}


SMALL = ("model.max_model_len=96", "cache.memory_bytes=200000")
WAYS: dict[str, tuple[tuple[str, ...], str]] = {
    # the way to compute tokens -> settings, and the metric that proves its use
    "one step each": ((), "swell_generation_tokens_total"),
    "drafts by n-grams": (
        ("drafts.method=ngram", "drafts.min_match=1"),
        "swell_draft_tokens_total",
    ),
    "drafts by a model": (
        ("drafts.method=model", "drafts.model.path={nano}"),
        "swell_accepted_draft_tokens_total",
    ),
    "four steps a plan": (("scheduler.steps_per_plan=4",), "swell_generation_tokens_total"),
    "blocks that leave and return": (
        (*SMALL, "cache.offload_bytes=32000000"),
        "swell_kv_offload_loaded_blocks_total",
    ),
    "prompts of another engine": (
        (
            "parallel.data=2",
            "parallel.prefill_engines=1",
            "parallel.prefill_min_tokens=1",
            "cache.handover_folder={folder}",
        ),
        "swell_generation_tokens_total",
    ),
}


@pytest.fixture(scope="module", params=WAYS)
def report(
    request: pytest.FixtureRequest, nano: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    settings, metric = WAYS[request.param]
    folder = tmp_path_factory.mktemp("files")
    with serve(nano, *(each.format(nano=nano, folder=folder) for each in settings)) as url:
        yield evaluate(url, nano, str(tmp_path_factory.mktemp("datasets")))
        metrics = httpx.get(f"{url}/metrics", timeout=HANG_S).text
    values = re.findall(rf"^{metric}(?:\{{.*\}})? (\S+)$", metrics, re.MULTILINE)
    assert sum(map(float, values)) > 0, metric
    assert any(folder.iterdir()) == (request.param == "prompts of another engine")


def evaluate(url: str, nano: Path, cache: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
        return lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                "model": "nano",
                "base_url": f"{url}/v1/completions",
                "tokenizer_backend": "huggingface",
                "tokenizer": str(nano),
                "max_length": 256,
            },
            tasks=[ConfigurableTask(config=CHOICE), ConfigurableTask(config=WRITE)],
            apply_chat_template=True,
            bootstrap_iters=0,
        )


def test_log_likelihoods_equal_those_of_transformers(report: Any, nano: Path, python: Path) -> None:
    samples = report["samples"]["choice"]
    pairs = [pair for sample in samples for pair in sample["arguments"]]
    response = [float(total) for sample in samples for total, _ in sample["filtered_resps"]]
    oracle = Path(__file__).with_name("loglikelihoods.py")
    out = subprocess.run(
        [python, oracle, nano], input=json.dumps(pairs), capture_output=True, text=True, check=True
    )
    assert response == pytest.approx(json.loads(out.stdout), abs=1e-3)
    assert report["results"]["choice"]["acc,none"] == 1.0


def test_texts_end_where_they_should(report: Any) -> None:
    assert report["results"]["write"]["exact_match,none"] == 1.0
