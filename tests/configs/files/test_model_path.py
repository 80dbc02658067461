"""A name is a path if its first part exists, and a file in place of a model is refused with its
kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swell.cluster.text.model_folder import check
from swell.configs.files.model_path import is_path, resolved
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
        ("m.gguf", "a GGUF file"),
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


@given(NAMES, NAMES)
def test_two_missing_path_parts_are_a_hub_id(owner: str, name: str) -> None:
    written = f"{owner}/{name}"
    there = Path("/nowhere/at/all")
    assert resolved(written, there) == written
    if not is_path(written):
        assert not owner.startswith((".", "~"))
