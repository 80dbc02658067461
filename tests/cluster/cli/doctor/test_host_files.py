"""Files that a host cannot read are reported. Different files have different digests, and large
files are not read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from swell.cluster.cli.doctor.probes import host_facts
from swell.cluster.cli.doctor.probes.host_facts import (
    cached_folder,
    collect_start_facts,
    config_files,
    named_paths,
    source_digest,
)
from swell.configs.schema import Config, load

SALT = b"salt"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    write_weights(tmp_path, "F32", b"1234")
    (tmp_path / "notes.md").write_text("no file of the model")
    (tmp_path / "keys").write_text("secret\n")
    return load(str(tmp_path), {"serve.api_keys_file": str(tmp_path / "keys")})


def write_weights(folder: Path, kind: str, data: bytes) -> None:
    header = {"w": {"dtype": kind, "shape": [1], "data_offsets": [0, len(data)]}}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_files_of_model_and_configuration_are_listed(config: Config) -> None:
    found = config_files(config, SALT)
    assert sorted(found) == [
        "config.json",
        "model.safetensors",
        "serve.api_keys_file",
        "tokenizer.json",
    ]
    assert found["config.json"].size_bytes == 2
    assert config_files(config, SALT) == found


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "keys"])
def test_a_changed_letter_changes_the_digest(config: Config, name: str) -> None:
    before = config_files(config, SALT)
    path = Path(config.model.path, name)
    path.write_text(path.read_text().swapcase() + " ")
    key = "serve.api_keys_file" if name == "keys" else name
    after = config_files(config, SALT)
    assert {other for other in after if after[other] != before[other]} == {key}


def test_the_digest_of_weights_covers_their_header(config: Config) -> None:
    """The digest covers only the header of a weights file and its size. Reading a whole checkpoint
    would take minutes."""
    folder = Path(config.model.path)
    before = config_files(config, SALT)["model.safetensors"]
    write_weights(folder, "F32", b"4321")
    assert config_files(config, SALT)["model.safetensors"] == before
    write_weights(folder, "I32", b"4321")
    assert config_files(config, SALT)["model.safetensors"].digest != before.digest
    write_weights(folder, "F32", b"12345678")
    assert config_files(config, SALT)["model.safetensors"].size_bytes != before.size_bytes


def test_a_printed_digest_reveals_no_key(config: Config) -> None:
    """A guessed key cannot be verified with a printed digest, because each run uses another
    salt."""
    key = "serve.api_keys_file"
    assert config_files(config, SALT)[key].digest != config_files(config, b"other")[key].digest


def test_unreadable_files_count_as_missing(config: Config) -> None:
    shutil.rmtree(config.model.path)
    assert config_files(config, SALT) == {}


@pytest.mark.parametrize("path", ["owner/not-in-any-cache", "./nowhere", "a/b/c", "/no/such/path"])
def test_a_model_that_the_host_lacks_is_missing(path: str) -> None:
    assert cached_folder(path) is None


def test_a_model_in_the_hub_cache_has_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts with different commits in their Hugging Face caches would serve different models."""
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("c0ffee")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert cached_folder("owner/name") == snapshot
    assert sorted(config_files(load("owner/name"), SALT)) == ["config.json"]


def test_the_digest_of_the_source_covers_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = tmp_path / "swell"
    for name in ("configs/__init__.py", "configs/schema.py", "kernels/__init__.py"):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text("x = 1\n")
    monkeypatch.setattr(host_facts.configs_package, "__file__", str(top / "configs/__init__.py"))
    before = source_digest()
    (top / "configs" / "models").mkdir()
    (top / "configs" / "models" / "train.py").write_text("a script")
    (top / "configs" / "demo.yaml").write_text("a: 1")
    assert source_digest() == before
    (top / "configs" / "schema.py").write_text("x = 2\n")
    assert source_digest() != before


def test_configured_files_are_checked_for_readability(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = load(str(tmp_path), {"serve.chat_template": "/nowhere/template.jinja"})
    assert sorted(named_paths(config)) == ["model.path", "serve.chat_template"]
    found = collect_start_facts(config, "127.0.0.1")
    assert found.unreadable == {"serve.chat_template": "/nowhere/template.jinja"}


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
