"""A name is a path if its first part exists, and a file in place of a model is refused with its
kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swell.cluster.text.model_check import check
from swell.configs.files.model_path import is_path, resolved, short_name
from swell.configs.schema import ConfigError, load

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1, max_size=12)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "configs").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(path: str, key: str = "model.path") -> str:
    settings = {"model.path": path} if key == "model.path" else {"drafts.model": {"path": path}}
    source = path if key == "model.path" else "owner/name"
    with pytest.raises(ConfigError) as found:
        check(load(source, {**settings, "drafts.method": "model"} if "drafts" in key else settings))
    return str(found.value)


@pytest.mark.parametrize("key", ["model.path", "drafts.model"])
def test_a_path_with_an_existing_first_part_is_not_a_hub_id(here: Path, key: str) -> None:
    text = refused("configs/nosuch", key)
    assert f"'{here}/configs/nosuch' is not a folder" in text and "has no 'nosuch'" in text


def test_a_hub_id_is_left_to_the_loader(here: Path) -> None:
    config = load("owner/name")
    check(config)
    assert config.model.path == "owner/name"


def test_a_relative_model_path_is_resolved_in_the_folder_of_the_file(here: Path) -> None:
    (here / "configs" / "a.yaml").write_text("model: {path: models/nosuch}\n")
    check(load("configs/a.yaml"))  # no folder `models` exists
    (here / "configs" / "models").mkdir()
    with pytest.raises(ConfigError, match="configs/models/nosuch' is not a folder"):
        check(load("configs/a.yaml"))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("model.safetensors", "a file with only the weights"),
        ("pytorch_model.bin", "pickle"),
        ("config.json", "a JSON file"),
        ("model", "is a file;"),
    ],
)
@pytest.mark.parametrize("folder", ["", "configs/"])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_refused_path_is_named_with_its_kind(
    here: Path, folder: str, name: str, what: str, is_there: bool
) -> None:
    if is_there:
        (here / folder / name).write_text("x")
    elif name == "model":
        what = "is not a folder"
    text = refused(folder + name)
    assert what in text and name in text and "owner/name" in text
    assert ("does not exist" in text) is (not is_there and name != "model")


@pytest.mark.parametrize("key", ["model.path", "drafts.model"])
def test_a_missing_or_damaged_gguf_file_is_refused(here: Path, key: str) -> None:
    text = refused("m.gguf", key)
    assert f"{key}='m.gguf' is a GGUF file (and does not exist)" in text
    (here / "m.gguf").write_text("x")
    text = refused("m.gguf", key)
    assert f"{here}/m.gguf" in text and "is not a GGUF file" in text


def test_a_folder_of_gguf_files_is_refused_with_the_name_of_a_file(here: Path) -> None:
    for name in ("q4.gguf", "q8.gguf"):
        (here / "configs" / name).write_text("x")
    assert f"specify the file, for example {here}/configs/q4.gguf" in refused("configs")


def test_a_gguf_file_is_resolved_in_the_folder_of_the_configuration(here: Path) -> None:
    (here / "configs" / "m.gguf").write_text("x")
    (here / "configs" / "a.yaml").write_text("model: {path: m.gguf}\n")
    config = load("configs/a.yaml")
    assert config.model.path == f"{here}/configs/m.gguf"
    assert config.model.served_name == "m"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/models/Qwen3-0.6B-Q4_K_M.gguf", "Qwen3-0.6B-Q4_K_M"),
        ("/models/big-00001-of-00003.gguf", "big"),
        ("/models/llama/", "llama"),
        ("owner/name-00001-of-00003", "name-00001-of-00003"),
    ],
)
def test_the_served_name_is_the_last_part_of_the_path(path: str, name: str) -> None:
    assert short_name(path) == name


@given(NAMES, NAMES)
def test_two_missing_path_parts_are_a_hub_id(owner: str, name: str) -> None:
    written = f"{owner}/{name}"
    there = Path("/nowhere/at/all")
    assert resolved(written, there) == written
    if not is_path(written):
        assert not owner.startswith((".", "~"))
