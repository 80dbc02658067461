"""The files that every host must have, by configuration key."""

from __future__ import annotations

from pathlib import Path

import pytest

from swell.cluster.cli.doctor.host_paths import named_paths, unreadable
from swell.configs.schema import load


def test_configured_files_are_checked_for_readability(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    paths = named_paths(load(str(tmp_path), {"serve.chat_template": "/nowhere/template.jinja"}))
    assert sorted(paths) == ["model.path", "serve.chat_template"]
    assert unreadable(paths) == ["serve.chat_template"]


def test_a_relative_name_means_the_same_file_on_every_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes of other hosts have other working directories."""
    for folder, file in (("here", "keys"), ("elsewhere", "keys"), ("elsewhere", "template")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / file).touch()
    source = tmp_path / "here" / "a.yaml"
    source.write_text("model: {path: m}\nserve: {api_keys_file: keys, chat_template: template}")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert named_paths(load(str(source))) == {
        "serve.api_keys_file": str(tmp_path / "here" / "keys"),
        "serve.chat_template": str(tmp_path / "elsewhere" / "template"),
    }


def test_the_folder_of_a_draft_model_is_named(tmp_path: Path) -> None:
    drafts = {"drafts.method": "model", "drafts.model": {"path": str(tmp_path)}}
    paths = named_paths(load("owner/name", drafts))
    assert paths == {"drafts.model": str(tmp_path / "config.json")}
    drafts["drafts.model"] = {"path": "owner/small"}
    assert named_paths(load("owner/name", drafts)) == {}


def test_a_hub_id_is_not_a_file() -> None:
    assert named_paths(load("owner/name")) == {}
