"""`swell save-sharded` writes a complete model that gives the same answers as the original."""

from __future__ import annotations

from pathlib import Path

import pytest

from swell.cluster.cli.main import main
from swell.cluster.control.plan.upgrade import UpgradeRefused
from swell.cluster.control.upgrade_check import cluster_id_of, upgraded
from swell.cluster.local import LLM, SamplingParams
from swell.cluster.text.model_check import check
from swell.configs.files.sharded_index import INDEX_NAME, file_names
from swell.configs.schema import ConfigError, load
from tests.test_layers import ROOT

pytestmark = pytest.mark.slow

NANO = ROOT / "configs" / "models" / "nano"
PROMPTS = ["upper: hello", "reverse: kitten", "add: 12+30", "count from 3 to 9"]
GREEDY = SamplingParams(temperature=0, max_tokens=60)


def tokens(folder: Path, **overrides: object) -> list[list[int]]:
    options = {key.replace("__", "."): value for key, value in overrides.items()}
    with LLM(str(folder), **{"cache.memory_bytes": 50_000_000, **options}) as llm:
        answers = llm.chat([[{"role": "user", "content": text}] for text in PROMPTS], GREEDY)
        return [list(answer.outputs[0].token_ids) for answer in answers]


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 2)])
def test_a_saved_model_answers_as_the_original(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tensor: int, pipeline: int
) -> None:
    out = tmp_path / "out"
    split = {"parallel.tensor": tensor, "parallel.pipeline": pipeline}
    options = [text for key, value in split.items() for text in ("--set", f"{key}={value}")]
    assert main(["save-sharded", str(NANO), str(out), *options]) == 0
    assert f"swell serve {out}" in capsys.readouterr().out
    keys = {"parallel__tensor": tensor, "parallel__pipeline": pipeline}
    want = tokens(NANO, **keys)
    assert len({tuple(answer) for answer in want}) == len(PROMPTS)
    assert tokens(out, **keys, model__load_format="sharded") == want
    assert tokens(out, **keys) == want, "auto finds the index"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("saved") / "out"
    assert main(["save-sharded", str(NANO), str(out)]) == 0
    return out


def test_errors_are_one_line(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["save-sharded", str(NANO), str(saved)]) == 1
    err = capsys.readouterr().err
    assert "never overwrites" in err and err.count("\n") == 1
    assert main(["save-sharded", str(saved), f"{saved}2"]) == 1
    assert "already" in capsys.readouterr().err
    assert main(["save-sharded", str(NANO), f"{saved}2", "--set", "parallel.expert=true"]) == 1
    assert "parallel.expert=false" in capsys.readouterr().err
    assert not Path(f"{saved}2").exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"parallel.tensor": 2}, "parallel.tensor=1"),
        ({"parallel.pipeline": 2}, "parallel.pipeline=1"),
        ({"model.dtype": "bfloat16"}, "model.dtype=float32"),
        ({"model.backend": "transformers"}, "model.backend=native"),
    ],
)
def test_a_wrong_configuration_is_refused_before_a_start(
    saved: Path, overrides: dict[str, object], words: str
) -> None:
    check(load(str(saved)))
    with pytest.raises(ConfigError) as refused:
        check(load(str(saved), overrides))
    assert words in str(refused.value)


def test_a_cluster_can_be_upgraded_to_a_saved_model(saved: Path) -> None:
    running = load(str(NANO))
    config, kept = upgraded(running, {"model": {"path": str(saved), "load_format": "sharded"}})
    assert config.model.path == str(saved) and kept == []
    assert cluster_id_of(config) == cluster_id_of(running)
    with pytest.raises(UpgradeRefused, match=r"parallel\.tensor=1"):
        upgraded(running, {"model": {"path": str(saved)}, "parallel": {"tensor": 2}})


def test_a_damaged_folder_is_refused_before_a_start(saved: Path) -> None:
    config = load(str(saved))
    file = saved / file_names(config.parallel)[0]
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(ConfigError, match=file.name):
        check(config)
    file.write_bytes(data)
    check(config)
    with pytest.raises(ConfigError, match=INDEX_NAME):
        check(load(str(NANO), {"model.load_format": "sharded"}))
