"""lm-eval's `local-completions` on a task of our own: log likelihoods are those of transformers,
and generated texts those that nano knows."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.api.task import ConfigurableTask

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


@pytest.fixture(scope="module")
def report(url: str, nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        cache = str(tmp_path_factory.mktemp("datasets"))
        patch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
        return lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                "model": "nano",
                "base_url": f"{url}/v1/completions",
                "tokenizer_backend": "huggingface",
                "tokenizer": str(nano),
                "max_length": 512,
            },
            tasks=[ConfigurableTask(config=CHOICE), ConfigurableTask(config=WRITE)],
            apply_chat_template=True,
            bootstrap_iters=0,
        )


def test_log_likelihoods_are_those_of_transformers(report: Any, nano: Path, python: Path) -> None:
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
