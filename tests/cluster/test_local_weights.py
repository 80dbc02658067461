"""Offline sleep and weight updates: answers equal those of an engine that was started with the new
weights."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from swell.cluster.local import LLM, SamplingParams
from swell.configs.schema import ModelConfig
from swell.worker.loader import load_weights
from swell.worker.memory.new_weights import save_weights
from tests.support.deadlines import HANG_S
from tests.support.device import on_device
from tests.support.weights.pooled_models import make as make_pooled
from tests.worker import tiny_models

NANO = Path(__file__).parents[2] / "configs" / "models" / "nano"

PROMPTS = ["sort: 3 1 2", "copy: abc", "upper: xyz"]
GREEDY = SamplingParams(temperature=0, max_tokens=8)
AXES: dict[str, dict[str, Any]] = {
    "one worker": {},
    "tensor 2": {"parallel.tensor": 2},
    "pipeline 2": {"parallel.pipeline": 2},
    "offload": {"cache.offload_bytes": 2**20},
    "drafts": {"drafts.method": "ngram"},
}


def make(folder: Path, seed: int, **sizes: int) -> Path:
    tiny_models.make(folder, "llama", seed=seed, vocab_size=512, **sizes)
    for file in NANO.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("old"), 1)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without tokenizer files, as training often writes it."""
    folder = make(tmp_path_factory.mktemp("new"), 2)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    return folder


def engine(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), **on_device({"cache.memory_bytes": 2_000_000, **settings}))


def answers(llm: LLM) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def expected(old: Path, new: Path) -> dict[str, list[list[int]]]:
    """Returns the answers of fresh engines with the old and the new weights."""
    found = {}
    for name, folder in (("old", old), ("new", new)):
        whole = folder
        if name == "new":
            whole = folder.parent / "whole"
            shutil.copytree(folder, whole, dirs_exist_ok=True)
            for file in NANO.glob("tokenizer*"):
                shutil.copy(file, whole)
        with engine(whole) as llm:
            found[name] = answers(llm)
    assert found["old"] != found["new"]
    return found


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("given", ["a folder", "tensors"])
def test_answers_come_from_the_new_weights(
    old: Path, new: Path, expected: dict[str, Any], axis: str, given: str
) -> None:
    source = new if given == "a folder" else load_file(new / "model.safetensors")
    with engine(old, **AXES[axis]) as llm:
        assert answers(llm) == expected["old"]
        llm.update_weights(source)
        assert answers(llm) == expected["new"]
        llm.update_weights(old)
        assert answers(llm) == expected["old"]


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_reads_new_weights_when_it_wakes_up(
    old: Path, new: Path, expected: dict[str, Any], level: int
) -> None:
    with engine(old) as llm:
        assert answers(llm) == expected["old"] and not llm.is_sleeping()
        llm.sleep(level)
        assert llm.is_sleeping()
        with pytest.raises(RuntimeError, match=rf"level {level}.*wake_up"):
            llm.generate(PROMPTS, GREEDY)
        llm.update_weights(load_file(new / "model.safetensors"))
        assert llm.is_sleeping()
        llm.wake_up()
        assert answers(llm) == expected["new"] and not llm.is_sleeping()
        llm.sleep(2)  # drops weights that came as tensors
        llm.wake_up()
        assert answers(llm) == expected["new"]


def test_a_sleep_grows_deeper_and_a_second_call_changes_nothing(
    old: Path, expected: dict[str, Any]
) -> None:
    with engine(old) as llm:
        llm.wake_up()
        for level in (1, 1, 2, 1):
            llm.sleep(level)
        assert llm._engine.sleep_level == 2
        llm.wake_up()
        llm.wake_up()
        assert answers(llm) == expected["old"]
        with pytest.raises(ValueError, match="level=3"):
            llm.sleep(3)


def test_a_folder_whose_files_were_replaced_is_read_again(
    old: Path, new: Path, tmp_path: Path, expected: dict[str, Any]
) -> None:
    folder = tmp_path / "step"
    shutil.copytree(old, folder)
    with engine(folder) as llm:
        assert answers(llm) == expected["old"]
        shutil.copy(new / "model.safetensors", folder / "next")
        (folder / "next").replace(folder / "model.safetensors")
        llm.update_weights(folder)
        assert answers(llm) == expected["new"]


def larger(folder: Path) -> Any:
    return make(folder, 3, hidden_size=64)


def another_key(folder: Path) -> Any:
    make(folder, 3)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 5.0}
    config["rope_theta"] = 5.0
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def without_a_tensor(folder: Path) -> Any:
    tensors = load_file(make(folder, 3) / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if "norm" not in name}


def of_another_shape(folder: Path) -> Any:
    tensors = load_file(make(folder, 3) / "model.safetensors")
    return {name: torch.cat([tensor, tensor]) for name, tensor in tensors.items()}


def cut(folder: Path) -> Any:
    file = make(folder, 3) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return folder


def lacking_what_the_index_names(folder: Path) -> Any:
    tensors = load_file(make(folder, 3) / "model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    tensors.popitem()
    save_file(tensors, folder / "model.safetensors")
    return folder


BAD = {
    "no folder": (lambda folder: folder / "none", "is not a folder"),
    "an empty folder": (lambda folder: folder, "config.json"),
    "another size": (larger, "head_dim=16"),
    "another theta": (another_key, "rope"),
    "a tensor is missing": (without_a_tensor, "have no"),
    "another shape": (of_another_shape, "shape"),
    "a file that is cut": (cut, "damaged"),
    "an index of more": (
        lacking_what_the_index_names,
        "does not have a tensor that the index lists",
    ),
    "no tensor": (lambda folder: {"a": 1}, "not a tensor"),
    "nothing": (lambda folder: {}, "have no"),
}


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        pytest.param(name, workers, marks=[pytest.mark.slow_variants] if (at + workers) % 2 else [])
        for at, name in enumerate(BAD)
        for workers in (1, 2)
    ],
)
def test_weights_that_cannot_be_used_change_nothing(
    old: Path, new: Path, tmp_path: Path, expected: dict[str, Any], name: str, workers: int
) -> None:
    make_bad, words = BAD[name]
    source = make_bad(tmp_path)
    with engine(old, **{"parallel.tensor": workers}) as llm:
        for _ in range(2):
            with pytest.raises(ValueError, match=words):
                llm.update_weights(source)
            assert answers(llm) == expected["old"]
        llm.update_weights(new)
        assert answers(llm) == expected["new"]
        llm.sleep(2)
        assert words in refusal_of(llm, source)
        llm.wake_up()
        assert answers(llm) == expected["new"]


NO_TENSORS = {
    "a number": ({"a": 1}, "'a' has the type int, which is not a tensor"),
    "a number as name": (
        {1: torch.zeros(1)},
        "1 has the type int; the name of a tensor must be a str",
    ),
    "no values": ({"a": torch.zeros(1, device="meta")}, "'a' has no values"),
    "sparse": ({"a": torch.zeros(2, 2).to_sparse()}, "layout torch.sparse_coo"),
}


@pytest.mark.parametrize("name", NO_TENSORS)
def test_tensors_outside_the_checkpoint_are_refused_by_name(
    old: Path, tmp_path: Path, name: str
) -> None:
    tensors, words = NO_TENSORS[name]
    with pytest.raises(ValueError, match=words):
        save_weights(tensors, ModelConfig(path=str(old)), tmp_path)


def test_tensors_may_share_a_buffer(old: Path, tmp_path: Path) -> None:
    buffer = torch.arange(12.0)
    tensors = {"a": buffer[:6], "b": buffer[6:], "c": buffer[3:9], "d": buffer, "e": buffer[::2]}
    save_weights(tensors, ModelConfig(path=str(old)), tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert {name: t.tolist() for name, t in saved.items()} == {
        name: t.tolist() for name, t in tensors.items()
    }


def refusal_of(llm: LLM, source: Any) -> str:
    """Returns the error of the update, which is raised at once or at wake-up. Empty: there was
    none."""
    try:
        llm.update_weights(source)
        llm.wake_up()
    except ValueError as error:
        return str(error)
    return ""


def test_temporary_folders_are_removed(
    old: Path, new: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tensors = load_file(new / "model.safetensors")
    with engine(old) as llm:
        for _ in range(3):
            llm.update_weights(tensors)
            assert len(list(tmp_path.iterdir())) == 1
        with pytest.raises(ValueError):
            llm.update_weights({})
        assert len(list(tmp_path.iterdir())) == 1
        monkeypatch.setattr("swell.cluster.local_engine.save_weights", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.update_weights(tensors)
        assert len(list(tmp_path.iterdir())) == 1
    assert not list(tmp_path.iterdir())


def interrupt(*_arguments: Any, **_options: Any) -> Any:
    raise KeyboardInterrupt


def interrupted(workers: int, call: Callable[[], None]) -> None:
    """Interrupts `call` while weights are loaded. One worker loads on the calling thread. Several
    load on their own threads and continue after the interrupt."""
    loads = threading.Event()

    def load(*arguments: Any) -> Any:
        loads.set()
        return load_weights(*arguments) if workers > 1 else interrupt()

    def wait(*_arguments: Any, **_options: Any) -> Any:
        assert loads.wait(HANG_S)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("swell.worker.worker.load_weights", load)
        patch.setattr("swell.engine.executor.inproc.wait", wait)
        with pytest.raises(KeyboardInterrupt):
            call()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("wakes", [False, True])
def test_an_interrupt_leaves_the_previous_weights_complete(
    old: Path, new: Path, expected: dict[str, Any], workers: int, wakes: bool
) -> None:
    with engine(old, **{"parallel.tensor": workers}) as llm:
        assert answers(llm) == expected["old"]
        if wakes:
            llm.sleep(2)
        interrupted(workers, llm.wake_up if wakes else lambda: llm.update_weights(new))
        assert answers(llm) == expected["old"]
        llm.update_weights(new)
        assert answers(llm) == expected["new"]


def test_weights_of_an_interrupted_call_are_read_again(
    old: Path, new: Path, tmp_path: Path, expected: dict[str, Any]
) -> None:
    """The files may have changed in the meantime."""
    folder = tmp_path / "step"
    shutil.copytree(old, folder)
    with engine(old, **{"parallel.tensor": 2}) as llm:
        interrupted(2, lambda: llm.update_weights(folder))
        shutil.copy(new / "model.safetensors", folder / "next")
        (folder / "next").replace(folder / "model.safetensors")
        llm.update_weights(folder)
        assert answers(llm) == expected["new"]


def test_random_weights_stay_if_new_ones_are_refused(old: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(old, bad)
    save_file(without_a_tensor(tmp_path), bad / "model.safetensors", {"format": "pt"})
    with engine(old, **{"model.load_format": "dummy"}) as llm:
        before = answers(llm)
        with pytest.raises(ValueError, match="have no"):
            llm.update_weights(bad)
        assert answers(llm) == before


def test_a_model_that_samples_does_not_become_one_that_pools(
    old: Path, new: Path, tmp_path: Path, expected: dict[str, Any]
) -> None:
    pools = tmp_path / "pools"
    shutil.copytree(new, pools)
    config = json.loads((pools / "config.json").read_text())
    (pools / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaModel"]}))
    with engine(old) as llm:
        with pytest.raises(
            ValueError, match=r"returns vectors of 128 .* served model returns text"
        ):
            llm.update_weights(pools)
        assert answers(llm) == expected["old"]


def test_a_pooling_model_keeps_its_pooling_method(tmp_path: Path) -> None:
    folders = tmp_path / "old", tmp_path / "new"
    for folder in folders:
        folder.mkdir()
        make_pooled(folder, "qwen3", modes={"pooling_mode": "mean"})
    old, new = folders
    halved = {name: t / 2 for name, t in load_file(new / "model.safetensors").items()}
    save_file(halved, new / "model.safetensors", {"format": "pt"})
    for file in new.glob("tokenizer*"):
        file.unlink()
    with engine(old) as llm:
        before = llm.embed("a b")[0].outputs.embedding
        with pytest.raises(ValueError, match=r"pooling last.*mean.*modules\.json"):
            llm.update_weights(halved)
        assert llm.embed("a b")[0].outputs.embedding == before
        llm.update_weights(new)
        assert llm.embed("a b")[0].outputs.embedding != before
        llm.update_weights(old)
        assert llm.embed("a b")[0].outputs.embedding == before


def test_adapters_and_shared_experts_are_refused(old: Path) -> None:
    with engine(old, **{"lora.enabled": True}) as llm:
        for call in (lambda: llm.sleep(2), lambda: llm.update_weights(old)):
            with pytest.raises(ValueError, match="adapters"):
                call()
        llm.sleep(1)
        llm.wake_up()
        assert answers(llm)
