"""A model folder with a quantization that is not supported is refused before anything is started,
for the reason for which the loader refuses it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from swell.cluster.text.model_check import check
from swell.configs.quantization.methods import METHODS
from swell.configs.schema import ConfigError, load
from swell.worker.hf_config import load_config
from swell.worker.quantization.detection import SCHEMES
from tests.support.paths import NANO
from tests.worker.quantization import declarations, writers

CONFIG, WEIGHTS = "config.json", "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of a model, which the test may replace."""
    for file in NANO.iterdir():
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


def declare(folder: Path, **values: Any) -> None:
    text = json.dumps({**json.loads((folder / CONFIG).read_text()), **values})
    (folder / CONFIG).unlink()
    (folder / CONFIG).write_text(text)


def refusal(folder: Path) -> str:
    """Returns why the folder is refused before a start, which is also the loader's reason."""
    config = load({"model": {"path": str(folder)}})
    with pytest.raises(ConfigError) as refused:
        check(config)
    with pytest.raises(ValueError) as by_loader:
        load_config(config.model)
    assert str(refused.value) == str(by_loader.value)
    return str(refused.value)


@pytest.mark.parametrize(("key", "value", "method"), declarations.METHODS)
def test_methods_that_are_not_supported(
    folder: Path, key: str, value: dict[str, Any], method: str
) -> None:
    declare(folder, **{key: value})
    text = refusal(folder)
    assert method in text and "serve the checkpoint from which it was made" in text


@pytest.mark.parametrize(("config", "value"), declarations.VALUES)
def test_values_that_are_not_supported(folder: Path, config: dict[str, Any], value: str) -> None:
    declare(folder, quantization_config=config)
    text = refusal(folder)
    assert value in text and config["quant_method"] in text


@pytest.mark.parametrize(("name", "content", "method"), declarations.FILES)
def test_files_next_to_the_config(
    folder: Path, name: str, content: dict[str, Any], method: str
) -> None:
    (folder / name).write_text(json.dumps(content))
    text = refusal(folder)
    assert name in text and method in text


@pytest.mark.parametrize("form", writers.FORMATS)
def test_formats_that_are_read_are_accepted(folder: Path, form: str) -> None:
    declare(folder, quantization_config=writers.FORMATS[form].config)
    config = load({"model": {"path": str(folder)}})
    check(config)
    load_config(config.model)


def test_every_accepted_method_has_a_scheme() -> None:
    assert METHODS.keys() == SCHEMES.keys()


def test_stored_tensors_that_are_not_supported_are_refused(folder: Path) -> None:
    declare(folder, quantization_config=writers.FORMATS["modelopt-nvfp4"].config)
    tensors = {**load_file(folder / WEIGHTS), "a.pre_quant_scale": torch.ones(1)}
    (folder / WEIGHTS).unlink()
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ConfigError, match=r"'a\.pre_quant_scale' has factors"):
        check(load({"model": {"path": str(folder)}}))


def test_serve_ends_with_the_reason_before_it_loads_anything(folder: Path) -> None:
    declare(folder, quantization_config={"quant_method": "hqq"})
    code = (
        "import sys\n"
        "from swell.cluster.cli.main import main\n"
        f"code = main(['serve', {str(folder)!r}, '--port', '0'])\n"
        "print(code, sorted({'ray', 'torch', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "1 []\n"
    assert run.stderr.startswith(f"swell: model {str(folder)!r} is quantized (quant_method 'hqq')")


def test_a_draft_model_is_refused_by_its_key(folder: Path) -> None:
    declare(folder, quantization_config={"quant_method": "hqq"})
    drafts = {"method": "model", "model": {"path": str(folder)}}
    with pytest.raises(ConfigError, match=r"^drafts\.model=.*'hqq'.* is not supported") as refused:
        check(load({"model": {"path": str(NANO)}, "drafts": drafts}))
    assert refused.value.key == "drafts.model"
