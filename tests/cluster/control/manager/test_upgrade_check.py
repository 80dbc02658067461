"""The parts of a configuration that an upgrade changes, leaves, or refuses by name."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from swell.cluster.control.plan.resources import resolve_device
from swell.cluster.control.plan.upgrade import UpgradeRefused, begin, take_over
from swell.cluster.control.plan.versions import UpgradeRecord
from swell.cluster.control.upgrade_check import (
    ModelFileReads,
    cluster_id_of,
    upgraded,
    version_hash,
    with_model_of,
)
from swell.configs.config_hash import config_hash
from swell.configs.schema import Config, load


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def make_model(folder: Path, *, template: str = "x", **config: Any) -> Path:
    folder.mkdir()
    text = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, **config}
    (folder / "config.json").write_text(json.dumps(text))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text(template)
    return folder


def configured(model: Path, **keys: Any) -> Config:
    keys = {"model.load_format": "dummy", **{k.replace("__", "."): v for k, v in keys.items()}}
    return load({"model": {"path": str(model)}}, keys)


def settings(model: Path, **keys: Any) -> dict[str, Any]:
    import msgspec

    found: dict[str, Any] = msgspec.to_builtins(configured(model, **keys))
    return found


def test_an_upgrade_changes_only_weights_and_limits(model: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other")
    running = configured(
        model, model__device="cpu", serve__port=7, cluster__min_engines=2, parallel__data=2
    )
    wanted = settings(other, model__max_model_len=99, scheduler__max_rows=3, parallel__data=1)
    merged, kept = upgraded(running, wanted)
    assert merged.model.path == str(other) and merged.model.served_name == "model"
    assert (merged.model.max_model_len, merged.scheduler.max_rows) == (99, 3)
    assert merged.serve == running.serve and merged.cluster == running.cluster
    assert kept == ["parallel.data", "serve.port", "cluster.min_engines"]
    assert config_hash(merged) != config_hash(running)
    assert cluster_id_of(merged) == cluster_id_of(running)


def test_an_unwritten_default_is_not_a_requested_change(model: Path) -> None:
    running = configured(model, serve__port=7, cluster__max_engines=3)
    wanted = {"model": {"path": str(model), "load_format": "dummy"}, "serve": {"host": "::"}}
    merged, kept = upgraded(running, wanted)
    assert kept == ["serve.host"] and merged == upgraded(running, settings(model))[0]


@pytest.mark.parametrize("was", ["auto", "cpu"])
@pytest.mark.parametrize("wanted", ["auto", "cpu"])
def test_the_running_configuration_is_refused_in_every_form(
    model: Path, was: str, wanted: str
) -> None:
    """The manager stores the configuration with the resolved device, and under its hash as
    given."""
    deployed, on_cpus = configured(model, model__device=was), {"CPU": 8.0}
    state = take_over(UpgradeRecord(), config_hash(deployed), resolve_device(deployed, on_cpus))
    running = state.record.get(state.record.wanted).config
    given, _ = upgraded(running, settings(model, model__device=wanted))
    config = resolve_device(given, on_cpus)
    name = version_hash(given, config, state.record.versions)
    with pytest.raises(UpgradeRefused, match="already has this configuration"):
        begin(state, name, config, ())
    other, _ = upgraded(running, settings(model, model__device=wanted, scheduler__max_rows=3))
    config = resolve_device(other, on_cpus)
    name = version_hash(other, config, state.record.versions)
    state = begin(state, name, config, ())
    assert name == config_hash(other), "the same file of Serve deploys it without a change"
    name = version_hash(given, resolve_device(given, on_cpus), state.record.versions)
    cancelled = begin(state, name, resolve_device(given, on_cpus), ())
    assert cancelled.record.phase == "cancelling"


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"model__name": "another"}, "model.name='another' differs from 'model'"),
        ({"cache__block_tokens": 32}, "cache.block_tokens=32"),
        ({"scheduler__policy": "priority"}, "scheduler.policy"),
        ({"parallel__expert": True}, "parallel.expert=true .* one group"),
        ({"parallel__pipeline": 3}, "parallel.pipeline=3 is above the model's 2 layers"),
        ({"model__load_format": "auto"}, "has no weights"),
    ],
)
def test_keys_that_ingresses_use_are_refused_by_name(
    model: Path, keys: dict[str, Any], text: str
) -> None:
    with pytest.raises(UpgradeRefused, match=text):
        upgraded(configured(model), settings(model, **keys))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"template": "y"}, "chat_template.jinja"),
        ({"eos_token_id": 3}, "config.json: eos_token_id"),
        ({"vocab_size": 3}, "config.json: vocab_size"),
    ],
)
def test_another_tokenizer_is_refused_by_the_names_of_its_files(
    model: Path, tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    other = make_model(tmp_path / "other", **change)
    with pytest.raises(UpgradeRefused, match=f"{text} of {other} differ"):
        upgraded(configured(model), settings(other))
    assert cluster_id_of(configured(model)) != cluster_id_of(configured(other, model__name="model"))


def test_another_hidden_size_is_refused_where_prompts_are_embeddings(
    model: Path, tmp_path: Path
) -> None:
    """Ingresses check the width of the embeddings. Elsewhere the hidden size does not matter."""
    other, embeds = make_model(tmp_path / "other", hidden_size=7), {"model__prompt_embeds": True}
    with pytest.raises(UpgradeRefused, match=r"config\.json: the width of embeddings"):
        upgraded(configured(model, **embeds), settings(other, **embeds))
    assert upgraded(configured(model), settings(other))[0].model.path == str(other)


def test_unreadable_configurations_are_refused(model: Path) -> None:
    with pytest.raises(UpgradeRefused, match="is not an absolute path"):
        upgraded(configured(model), settings(Path("owner/name")))
    with pytest.raises(UpgradeRefused, match=r"unknown key 'model\.wight'"):
        upgraded(configured(model), {"model": {"path": str(model), "wight": 1}})


def test_engines_that_share_experts_have_one_version(model: Path) -> None:
    one, other = (configured(model, parallel__expert=True, model__seed=seed) for seed in (1, 2))
    assert cluster_id_of(one) != cluster_id_of(other)
    one, other = (configured(model, model__seed=seed) for seed in (1, 2))
    assert cluster_id_of(one) == cluster_id_of(other)


def test_other_limits_of_engines_that_share_experts_are_refused_with_the_way_out(
    model: Path,
) -> None:
    running = configured(model, parallel__expert=True)
    with pytest.raises(UpgradeRefused) as refused:
        upgraded(running, settings(model, parallel__expert=True, scheduler__max_rows=7))
    for part in ("steps in flight", "cluster.min_engines=1", "serve deploy", "a second cluster"):
        assert part in str(refused.value)


def test_an_ingress_reads_the_running_model_and_keeps_the_deployed_name(
    model: Path, tmp_path: Path
) -> None:
    other = make_model(tmp_path / "other")
    merged = with_model_of(configured(model, serve__port=7), configured(other))
    assert merged.model.path == str(other) and merged.model.served_name == "model"
    assert merged.serve.port == 7


def test_model_keys_that_only_ingresses_read_keep_their_deployed_values(model: Path) -> None:
    """A redeployment through Serve changes such keys without new engines."""
    before = configured(model)
    after = configured(model, model__special_tokens_in_text="control")
    assert config_hash(after) == config_hash(before) and cluster_id_of(after) == cluster_id_of(
        before
    )
    assert with_model_of(after, before).model.special_tokens_in_text == "control"
    with pytest.raises(UpgradeRefused, match="special_tokens_in_text"):
        upgraded(before, settings(model, model__special_tokens_in_text="control"))


SPARSE_BYTES = 2**40
JSON_FILES = ("config.json", "generation_config.json")
FILES = (*JSON_FILES, "tokenizer.json", "model.safetensors", "model.safetensors.index.json")


def spoil(path: Path, how: str) -> None:
    path.unlink(missing_ok=True)
    if how == "a fifo":
        os.mkfifo(path)
    elif how == "a device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            if path.suffix == ".safetensors":  # a header as long as the file
                file.write((SPARSE_BYTES - 8).to_bytes(8, "little"))
            file.truncate(SPARSE_BYTES)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["a fifo", "a device", "huge"])
def test_endless_files_are_refused_and_not_read(
    model: Path, tmp_path: Path, name: str, how: str
) -> None:
    """A manager that reads such a file would hang or run out of memory."""
    other = make_model(tmp_path / "other")
    spoil(other / name, how)
    load_format = "auto" if "safetensors" in name else "dummy"
    wanted = settings(other, model__load_format=load_format)
    with pytest.raises(UpgradeRefused) as caught:
        upgraded(configured(model), wanted)
    message = str(caught.value)
    # The names of tokenizers and weights count only for regular files: others are reported as
    # missing.
    is_missing = how != "huge" and name not in JSON_FILES
    assert (name in message) or (is_missing and "weights" in message), message


@pytest.mark.parametrize("path", ["other", "./other", "other/sub", "../other"])
def test_a_relative_path_is_refused_in_every_working_directory(
    model: Path, tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path would mean another folder on each host."""
    make_model(tmp_path / "other").rename(tmp_path / "moved")
    (tmp_path / "other").mkdir()
    (tmp_path / "moved").rename(tmp_path / "other" / "sub")
    monkeypatch.chdir(tmp_path)
    wanted = settings(model)
    for section in (
        {"model": {"path": path}},
        {"drafts": {"method": "model", "model": {"path": path}}},
    ):
        merged = {name: {**wanted[name], **section.get(name, {})} for name in wanted}
        with pytest.raises(UpgradeRefused, match=r"(model\.path|drafts\.model).*absolute"):
            upgraded(configured(model), merged)


def test_the_running_hub_id_may_stay() -> None:
    running = load({"model": {"path": "owner/name", "generation_config": "none"}})
    wanted = {"model": {"path": "owner/name", "generation_config": "none"}}
    wanted["model"]["dtype"] = "float32"
    merged, _ = upgraded(running, wanted)
    assert merged.model.path == "owner/name" and merged.model.dtype == "float32"


def test_hanging_files_delay_neither_the_manager_nor_other_upgrades(model: Path) -> None:
    running, released = configured(model), threading.Event()

    def hang(config: Config, _wanted: Any) -> tuple[Config, list[str]]:
        released.wait()
        return config, []

    async def run() -> None:
        reads = ModelFileReads(limit_s=0.05)
        hanging: Any = {"model": {"path": "/hanging"}}
        for wanted in (hanging, "/hanging", hanging, "/hanging"):
            with pytest.raises(UpgradeRefused, match="not read within"):
                await reads.run(hang, running, wanted)
        with pytest.raises(UpgradeRefused, match="4 reads of this folder are in progress"):
            await reads.run(hang, running, hanging)
        patient = ModelFileReads()
        patient._calls = reads._calls
        assert await patient.run(lambda one, _: (one, []), running, "/good") == (running, [])

    try:
        asyncio.run(run())
    finally:
        released.set()


BAD_FOLDERS: dict[str, tuple[dict[str, str | None], str]] = {
    "no config": ({"config.json": None}, r"config\.json cannot be read; a model folder holds one"),
    "no JSON": ({"config.json": "{"}, r"config\.json is not JSON"),
    "a list": ({"config.json": "[]"}, r"config\.json does not contain a JSON object"),
    "no architecture": ({"config.json": "{}"}, r"config\.json has neither 'architectures'"),
    "no tokenizer": (
        {"tokenizer.json": None, "chat_template.jinja": None},
        r"lacks chat_template\.jinja, tokenizer\.json, which .*model has; copy",
    ),
    "another tokenizer": ({"tokenizer.json": "{2"}, r"tokenizer\.json of .* differ from"),
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_a_bad_model_folder_is_refused_with_its_defect(
    model: Path, tmp_path: Path, name: str
) -> None:
    changes, message = BAD_FOLDERS[name]
    bad = make_model(tmp_path / "bad")
    for file, text in changes.items():
        (bad / file).unlink()
        if text is not None:
            (bad / file).write_text(text)
    with pytest.raises(UpgradeRefused, match=message):
        upgraded(configured(model), settings(bad))


def test_a_model_folder_without_weights_is_refused(model: Path, tmp_path: Path) -> None:
    bad = make_model(tmp_path / "bad")
    with pytest.raises(UpgradeRefused, match="has no weights"):
        upgraded(configured(model), settings(bad, model__load_format="auto"))
