"""Experts with quantized weights: answers equal those of dequantized weights to the last bit, for
any split and placement of the experts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from swell.cluster.local import LLM
from swell.configs.schema import ParallelConfig, load
from swell.kernels.linear import panel
from swell.kernels.weights.quantized import PackedQuantizedTensor
from swell.worker.comm.mesh import Mesh
from swell.worker.hf_config import load_config
from swell.worker.layers.moe import MoE
from swell.worker.layers.packed_weight import Packing, pack_weights
from swell.worker.loader import load_weights
from swell.worker.models import build_model
from swell.worker.models.generic.experts import Experts
from swell.worker.worker import Worker
from tests.support.gguf.files import gguf_of
from tests.worker.checkpoint.test_gguf_models import greedy, random_folder
from tests.worker.moe.moe_engines import EngineGroup
from tests.worker.moe.moe_engines import answers as answers_of_group
from tests.worker.quantization import writers
from tests.worker.quantization.copies import answers, answers_of, copies
from tests.worker.test_model_quantize import BITS, make, twin

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(panel("cpu") is None, reason="no compiler: only a slow backend computes"),
]

ON_CPU = {"model.device": "cpu"}
SIZES = {"moe_intermediate_size": 64, "intermediate_size": 192}
COUNT, LAYERS = 4, 4


def expert_weights(model: Any) -> Iterator[tuple[str, Any]]:
    """Yields the matrices of experts, with a name."""
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            for expert, pair in sorted(module.local_experts.items()):
                yield from ((f"{name}.{expert}.{part}", each) for part, each in enumerate(pair))
        if isinstance(module, Experts):
            for expert, pair in enumerate(zip(module.gate_up, module.down, strict=True)):
                yield from (
                    (f"{name}.{expert}.{part}", each.weight) for part, each in enumerate(pair)
                )


def forms(folder: Path, **settings: Any) -> list[int]:
    """Returns the bits of the experts' matrices in a loaded worker; 0: not quantized."""
    worker = Worker(load(str(folder), {"model.dtype": "float32", **ON_CPU, **settings}))
    worker.load()
    found = [each for _, each in expert_weights(worker.model)]
    worker.shutdown()
    return [each.form.bits if isinstance(each, PackedQuantizedTensor) else 0 for each in found]


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    # name -> family, form, settings
    "mixtral, 8 bits": ("mixtral", "int8", {}),
    "qwen3_moe, 4 bits": ("qwen3_moe", "int4", {}),
    "bfloat16": ("qwen3_moe-mixed", "int8", {"model.dtype": "bfloat16"}),
    "tensor 2": ("mixtral", "int4", {"parallel.tensor": 2}),
    "pipeline 2": ("qwen3_moe", "int8", {"parallel.pipeline": 2}),
    "generic": ("qwen3_moe", "int4", {"model.backend": "transformers"}),
    "generic, pipeline 2": (
        "mixtral",
        "int8",
        {"model.backend": "transformers", "parallel.pipeline": 2},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_answers_equal_those_of_dequantized_experts(case: str, tmp_path: Path) -> None:
    family, form, settings = CASES[case]
    folder = make(tmp_path / "floats", family, **SIZES)
    dtype = getattr(torch, settings.get("model.dtype", "float32"))
    settings = {**ON_CPU, **settings}
    expected = answers(twin(folder, tmp_path / "twin", BITS[form], dtype), **settings)
    quantized = {**settings, "model.quantize": form}
    assert answers(folder, **quantized) == expected
    found = forms(folder, **{**quantized, "parallel.tensor": 1, "parallel.pipeline": 1})
    assert set(found) == {BITS[form]}, found


def test_integer_activations_of_experts_are_batch_invariant(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", "mixtral", **SIZES)
    settings = {**ON_CPU, "model.dtype": "float32", "cache.memory_bytes": 2_000_000}
    values = {**settings, "model.quantize": "int4", "model.activations": "int8"}
    with LLM(str(folder), **values) as llm:
        together = answers_of(llm)
        alone = [answers_of(llm, [row]) for row in range(len(together))]
    assert alone == [[one] for one in together]
    assert together != answers(folder, **{**values, "model.activations": "exact"})


KEPT = {"gptq": 4, "awq": 4, "ct-int8": 8, "ct-w4a16-channel": 4}


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("name", KEPT)
def test_integers_of_experts_are_kept(name: str, family: str, backend: str, tmp_path: Path) -> None:
    quantized, plain = copies(tmp_path, writers.FORMATS[name], family, **SIZES)
    settings = {**ON_CPU, "model.backend": backend}
    kept = {**settings, "model.quantize": "keep"}
    assert answers(quantized, **kept) == answers(plain, **settings)
    assert forms(quantized, **kept) == [KEPT[name]] * (2 * COUNT * 2)


def test_experts_of_a_gguf_file_are_kept(tmp_path: Path) -> None:
    folder = random_folder(tmp_path / "folder", "qwen3moe")
    file = gguf_of(folder, tmp_path / "m.gguf", ("Q8_0",))
    for backend in ("native", "transformers"):
        settings = {"model.backend": backend}
        kept = {**settings, "model.quantize": "keep"}
        assert greedy(file, **kept) == greedy(file, **settings)
        assert set(forms(file, **kept)) == {8}


@pytest.mark.parametrize("level", [1, 2])
def test_quantized_experts_sleep_and_are_replaced(level: int, tmp_path: Path) -> None:
    old = make(tmp_path / "old", "qwen3_moe", **SIZES)
    new = make(tmp_path / "new", "qwen3_moe", seed=2, **SIZES)
    settings = {**ON_CPU, "model.quantize": "int8", "model.dtype": "float32"}
    expected = answers(new, **settings)
    with LLM(str(old), **{**settings, "cache.memory_bytes": 2_000_000}) as llm:
        before = answers_of(llm)
        llm.sleep(level=level)
        llm.wake_up()
        assert answers_of(llm) == before
        llm.update_weights(str(new))
        assert answers_of(llm) == expected != before


@pytest.mark.parametrize("form", ["int4", "keep"])
def test_quantized_experts_move_between_engines(form: str, tmp_path: Path) -> None:
    """An expert from a peer has the same bytes as one from the checkpoint."""
    quantized, plain = copies(tmp_path, writers.FORMATS["gptq"], "mixtral", **SIZES)
    folder = quantized
    if form == "int4":
        folder, plain = plain, twin(plain, tmp_path / "twin", 4)
    with EngineGroup(plain) as group:
        alone = group.add()
        group.regroup(alone)
        expected = answers_of_group(group, [[0, 1, 2, 3]])
    with EngineGroup(folder, model__quantize=form) as group:
        first, second, third = (group.add() for _ in range(3))
        group.regroup(first)
        loaded = {key: each.data.clone() for key, each in held(first)}
        assert answers_of_group(group, [[0, 1, 2, 3]]) == expected
        [[_], [to_second]] = group.regroup(first, second)
        assert to_second.experts_moved > 0 == to_second.experts_loaded
        assert answers_of_group(group, [[0, 1], [2, 3]]) == expected
        for key, weight in (*held(first), *held(second)):
            assert isinstance(weight, PackedQuantizedTensor), key
            assert torch.equal(weight.data, loaded[key]), key
        [[_], [to_third]] = group.regroup(second, third)
        assert to_third.experts_moved + to_third.experts_loaded > 0
        assert answers_of_group(group, [[0, 1], [2, 3]]) == expected


def held(engine: Any) -> Iterator[tuple[str, Any]]:
    return expert_weights(engine.workers[0].model)


def test_experts_that_are_quantized_while_they_are_loaded_equal_those_quantized_later(
    tmp_path: Path,
) -> None:
    folder = make(tmp_path / "m", "qwen3_moe", **SIZES)
    packing, found = Packing(bits=4), []
    config = load(str(folder), {**ON_CPU, "model.dtype": "float32"}).model
    for at_once in (False, True):
        model: Any = build_model(
            config, load_config(config), Mesh.build(ParallelConfig(), 0), "cpu", torch.float32
        )
        load_weights(model, config, packing=packing if at_once else Packing())
        if at_once:
            assert all(isinstance(each, PackedQuantizedTensor) for _, each in expert_weights(model))
        pack_weights(model, packing)
        found.append(dict(expert_weights(model)))
    later, at_load = found
    assert later.keys() == at_load.keys() and len(later) == 2 * COUNT * LAYERS
    for name, weight in later.items():
        assert torch.equal(weight.data, at_load[name].data), name


def test_a_worker_expects_the_bytes_of_quantized_experts(tmp_path: Path) -> None:
    """The memory that is left for experts which come later is enough, and not that of floats."""
    folder = make(tmp_path / "m", "mixtral", **SIZES)
    sizes = {}
    for form in ("none", "int8", "int4", "keep"):
        worker = Worker(load(str(folder), {**ON_CPU, "model.quantize": form}))
        worker.load()
        for layer in worker.model.moe_layers():  # type: ignore[union-attr]
            for pair in layer.local_experts.values():
                assert sum(each.data.nbytes for each in pair) <= layer.expert_bytes
            sizes[form] = layer.expert_bytes
        worker.shutdown()
    assert sizes["int8"] < 0.3 * sizes["none"] == 0.3 * sizes["keep"]
    assert sizes["int4"] < 0.65 * sizes["int8"]


@pytest.mark.parametrize("shared", [False, True])
def test_experts_that_do_not_consist_of_groups_are_refused(shared: bool, tmp_path: Path) -> None:
    folder = make(tmp_path / "m", "qwen3_moe", **{**SIZES, "moe_intermediate_size": 48})
    settings = {**ON_CPU, "model.quantize": "int8", "parallel.expert": shared}
    worker = Worker(load(str(folder), settings))
    with pytest.raises(ValueError, match=r"has 48 inputs in each worker") as error:
        worker.load()
    assert "mlp.experts" in str(error.value) and "model.quantize=none" in str(error.value)
