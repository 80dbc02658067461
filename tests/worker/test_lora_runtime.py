"""Adapters that are loaded and unloaded while requests run: each answer is that of the adapter that
its request named, merged into the weights, although another adapter had its slot before."""

from __future__ import annotations

import queue
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import transformers

from swell.cluster.local import LLM
from swell.configs.files.adapter_files import WEIGHTS_NAME, adapter_digest
from swell.configs.lora import Adapter
from swell.engine.wire import EngineCoreRequest
from swell.worker.lora import AdapterNotLoaded, Adapters
from swell.worker.sampler_wire import SamplerParams
from swell.worker.wire import AdapterLoaded, LoadAdapter
from tests.support.deadlines import HANG_S
from tests.support.weights import adapters
from tests.worker.test_lora import GREEDY, KINDS, PROMPTS, Folders, ids_of

pytestmark = pytest.mark.slow

SPLITS: dict[str, dict[str, Any]] = {
    "whole": {},
    "two steps in flight": {"parallel.executor": "inproc", "parallel.tensor": 2},
    "pipeline": {"parallel.pipeline": 2, "scheduler.max_tokens_per_step": 16},
    "preemption": {"cache.block_tokens": 8, "cache.memory_bytes": 181_000},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("llama"), "llama")


def serve(folders: Folders, **overrides: Any) -> LLM:
    """Serves the model without configured adapters."""
    return folders.serve(
        **{"lora.adapters": {}, "lora.enabled": True, "lora.max_adapters": 2, **overrides}
    )


@pytest.mark.parametrize("split", SPLITS)
def test_more_adapters_than_slots_take_turns(llama: Folders, split: str) -> None:
    """Four adapters share two slots in one batch: requests of the others wait, and none gets
    another adapter's answer."""
    names = [name for _ in PROMPTS for name in llama.reference]
    prompts = [prompt for prompt in PROMPTS for _ in llama.reference]
    expected = [llama.reference[name][i // len(llama.reference)] for i, name in enumerate(names)]
    with serve(llama, **SPLITS[split]) as llm:
        for name, folder in llama.adapters.items():
            llm.load_adapter(name, folder)
        for _ in range(2):
            assert ids_of(llm.generate(prompts, GREEDY, adapter=names)) == expected
        if split == "preemption":
            assert llm._engine.core.scheduler.num_preemptions > 0
        llm.check_idle()


def test_configured_adapters_stay_loaded(llama: Folders) -> None:
    own = dict(list(llama.adapters.items())[:2])
    with serve(llama, **{"lora.adapters": own, "lora.max_adapters": 1}) as llm:
        for name in list(llama.adapters)[2:]:
            llm.load_adapter(name, llama.adapters[name])
        names = list(llama.reference) * 2
        found = ids_of(llm.generate([PROMPTS[1]] * len(names), GREEDY, adapter=names))
        assert found == [llama.reference[name][1] for name in names]
        with pytest.raises(ValueError, match="cannot be replaced"):
            llm.load_adapter(next(iter(own)), llama.adapters["mlp"])


def test_the_same_name_with_other_files_is_another_adapter(llama: Folders) -> None:
    """A name with other files is another adapter: no request of the new one finds the KV cache of
    the old one."""
    with serve(llama, **{"cache.block_tokens": 8}) as llm:
        for name in ("all", "mixed", "all"):
            llm.load_adapter("mine", llama.adapters[name])
            (output,) = llm.generate([PROMPTS[2]], GREEDY, adapter="mine")
            assert ids_of([output]) == [llama.reference[name][2]]
        assert output.num_cached_tokens == 32, "the same files have the same KV"
        llm.unload_adapter("mine")
        with pytest.raises(ValueError, match="'mine' is not loaded"):
            llm.generate([PROMPTS[2]], GREEDY, adapter="mine")


@pytest.mark.parametrize("split", ["whole", "two steps in flight"])
def test_an_unloadable_adapter_fails_only_its_requests(
    llama: Folders, split: str, tmp_path: Path
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(llama.model)
    shapes = adapters.module_shapes(model)
    narrow = {
        name: (shape[0] // 2, shape[1]) if "q_proj" in name else shape
        for name, shape in shapes.items()
    }
    changed = tmp_path / "changed"
    shutil.copytree(llama.adapters["mixed"], changed)
    with serve(llama, **SPLITS[split]) as llm:
        llm.load_adapter("narrow", str(adapters.make_adapter(tmp_path / "narrow", narrow)))
        llm.load_adapter("changed", str(changed))
        llm.load_adapter("good", llama.adapters["all"])
        adapters.make_adapter(changed, shapes, seed=99)
        for _ in range(2):
            answers = llm.generate(
                [PROMPTS[0]] * 4, GREEDY, adapter=["narrow", "", "changed", "good"]
            )
            assert [answer.outputs[0].finish_reason for answer in answers] == [
                "error",
                "length",
                "error",
                "length",
            ]
            assert "has 128 inputs and 64 outputs" in str(answers[0].outputs[0].stop_reason)
            assert "has other files here" in str(answers[2].outputs[0].stop_reason)
            assert ids_of(answers[1::2]) == [llama.reference[name][0] for name in ("", "all")]
        llm.check_idle()
        shutil.rmtree(changed)
        shutil.copytree(llama.adapters["mixed"], changed)
        (again,) = llm.generate([PROMPTS[0]], GREEDY, adapter="changed")
        assert ids_of([again]) == [llama.reference["mixed"][0]], "it is tried again"


@pytest.mark.parametrize("split", ["whole", "two steps in flight"])
def test_a_hanging_folder_delays_only_its_own_requests(
    llama: Folders, split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that hangs delays only its own requests, however many adapters hang. Others still
    find a slot, and the engine can shut down."""
    with serve(llama, **SPLITS[split], **{"lora.max_adapters": 3}) as llm:
        core = llm._engine.core

        def add(name: str, folder: str, digest: str) -> None:
            adapter = Adapter(name, folder, digest)
            request = EngineCoreRequest(
                name, PROMPTS[0], SamplerParams(), 12, cache_salt=digest, adapter=adapter
            )
            assert core.add_request(request, b"client") is None

        hanging = [tmp_path / name for name in ("hangs", "hangs too")]
        for folder in hanging:
            shutil.copytree(llama.adapters["mixed"], folder)
        released = adapters.hang(monkeypatch, *(folder / WEIGHTS_NAME for folder in hanging))
        for folder in hanging:
            add(folder.name, str(folder), f"digest of {folder.name}")
        for name, folder in llama.adapters.items():
            add(name, folder, adapter_digest(name, folder))
        tokens: dict[str, list[int]] = {name: [] for name in llama.adapters}
        while any(len(ids) < 12 for ids in tokens.values()):
            for output in core.step().get(b"client", []):
                tokens[output.request_id] += output.new_token_ids
        assert tokens == {name: llama.reference[name][0] for name in llama.adapters}
        assert core.adapters.num_held == 2
        core.abort_client(b"client")
        llm.check_idle()
        released.set()


def test_files_that_change_while_they_are_read_are_not_loaded(
    llama: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are written while they are read load nothing: neither wrong weights under a name,
    nor a crash of the process that reads them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(llama.model)
    changed = tmp_path / "changed"
    shutil.copytree(llama.adapters["mixed"], changed)
    content = (changed / "adapter_model.safetensors").read_bytes()
    writes = iter(
        [
            lambda: adapters.make_adapter(changed, adapters.module_shapes(model), seed=99),
            lambda: (changed / "adapter_model.safetensors").write_bytes(content[:-4096]),
            lambda: (changed / "adapter_model.safetensors").write_bytes(b""),
        ]
    )
    read = Adapters._read

    def written_before(self: Adapters, *args: Any) -> Any:
        next(writes, lambda: None)()
        return read(self, *args)

    with serve(llama) as llm:
        llm.load_adapter("changed", str(changed))
        monkeypatch.setattr(Adapters, "_read", written_before)
        answers = llm.generate([PROMPTS[0]] * 2, GREEDY, adapter=["changed", ""])
        assert [one.outputs[0].finish_reason for one in answers] == ["error", "length"]
        assert ids_of(answers[1:]) == [llama.reference[""][0]]
        monkeypatch.undo()
        (changed / "adapter_model.safetensors").write_bytes(content)
        shutil.rmtree(changed)
        shutil.copytree(llama.adapters["mixed"], changed)
        (again,) = llm.generate([PROMPTS[0]], GREEDY, adapter="changed")
        assert ids_of([again]) == [llama.reference["mixed"][0]]


def test_other_requests_run_while_an_adapter_is_loaded(
    llama: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_load, load = threading.Event(), Adapters._load

    def slow(self: Adapters, *args: Any) -> int:
        assert may_load.wait(HANG_S)
        return load(self, *args)

    monkeypatch.setattr(Adapters, "_load", slow)
    with serve(llama) as llm:
        llm.load_adapter("all", llama.adapters["all"])
        finished: list[str] = []
        take_answer = llm._engine._take_answer

        def note(id: str, outputs: Any, answers: Any) -> None:
            take_answer(id, outputs, answers)
            finished.append(id)
            if len(finished) == 1:
                may_load.set()

        monkeypatch.setattr(llm._engine, "_take_answer", note)
        answers = llm.generate([PROMPTS[0]] * 2, GREEDY, adapter=["all", ""])
        assert ids_of(answers) == [llama.reference[name][0] for name in ("all", "")]
        assert finished == [answers[1].request_id, answers[0].request_id]


def test_each_kind_of_adapter_has_its_own_digest(llama: Folders) -> None:
    digests = {adapter_digest(name, llama.adapters[name]) for name in KINDS}
    assert len(digests) == len(KINDS)


def test_an_adapter_that_moves_to_another_slot_survives_the_reuse_of_the_old_one(
    llama: Folders,
) -> None:
    """An adapter that moves to another slot is not lost with its old one. This happens after a load
    that took too long, when the engine has reassigned the first slot."""
    with serve(llama) as llm:
        worker = llm._engine.core.executor._worker  # type: ignore[attr-defined]
        answers: queue.SimpleQueue[AdapterLoaded] = queue.SimpleQueue()
        made = {
            name: Adapter(name, folder, adapter_digest(name, folder))
            for name, folder in llama.adapters.items()
        }
        for place, name in ((0, "all"), (1, "all"), (0, "mlp"), (0, "mlp"), (1, "mixed")):
            worker.load_adapter(LoadAdapter(place, made[name]), answers.put)
            assert answers.get(timeout=HANG_S) == AdapterLoaded(0, made[name].digest)
            assert worker.adapters.number_of(made[name].digest) == place
        for name in ("all", "attention"):
            with pytest.raises(AdapterNotLoaded):
                worker.adapters.number_of(made[name].digest)
