"""`model.quantize`: an engine has the answers and logprobs of an engine that loads the dequantized
weights, to the last bit."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from swell.cluster.local import LLM, SamplingParams
from swell.configs.schema import Config, ModelConfig, ParallelConfig, load
from swell.kernels.linear import panel
from swell.kernels.weights.quantized import (
    GROUPS,
    PackedQuantizedTensor,
    QuantizedTensor,
    quantize,
)
from swell.worker.comm.mesh import Mesh
from swell.worker.hf_config import load_config
from swell.worker.layers.packed_weight import PackedWeight, Packing, pack_weights
from swell.worker.loader import load_weights
from swell.worker.models import build_model
from swell.worker.sharded.saving import save_sharded
from swell.worker.worker import Worker
from tests.support.weights import adapters
from tests.worker import tiny_models

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(panel("cpu") is None, reason="no compiler: only a slow backend computes"),
]

NANO = Path(__file__).parents[2] / "configs" / "models" / "nano"
PROMPTS = [[5, 6, 7, 8, 9], [11, 300, 12], list(range(20, 60))]
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=3)
BITS = {"int8": 8, "int4": 4}
SIZES = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 512}


def make(folder: Path, family: str, **changes: Any) -> Path:
    tiny_models.make(folder, family, **{**SIZES, **changes})
    for file in NANO.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def twin(folder: Path, out: Path, bits: int, dtype: torch.dtype = torch.float32) -> Path:
    """Writes the model with dequantized weights into `out`."""
    out.mkdir()
    for file in folder.iterdir():
        if file.suffix == ".json":
            (out / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    is_tied = "lm_head.weight" not in weights
    for name, weight in weights.items():
        if name.endswith(("proj.weight", "w1.weight", "w2.weight", "w3.weight")):
            weights[name] = quantize(weight.to(dtype), bits).dequantize(dtype)
        elif name == "lm_head.weight" or (is_tied and name == "model.embed_tokens.weight"):
            weights[name] = quantize(weight.to(dtype), 8).dequantize(dtype)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def engine(folder: Path, **settings: Any) -> LLM:
    settings = {"model.device": "cpu", "cache.memory_bytes": 8_000_000, **settings}
    return LLM(str(folder), **settings)


def answers(llm: LLM, **options: Any) -> list[Any]:
    found = [one.outputs[0] for one in llm.generate(PROMPTS, GREEDY, **options)]
    return [(list(each.token_ids), each.logprobs) for each in found]


def answers_of(folder: Path, **settings: Any) -> list[Any]:
    with engine(folder, **settings) as llm:
        return answers(llm)


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    # name -> family, form, settings
    "8 bits": ("llama", "int8", {}),
    "4 bits, tied": ("llama-tied", "int4", {}),
    "8 bits, bfloat16": ("llama-bias", "int8", {"model.dtype": "bfloat16"}),
    "4 bits, bfloat16": ("qwen3", "int4", {"model.dtype": "bfloat16"}),
    "tensor 2": ("llama", "int4", {"parallel.tensor": 2}),
    "tensor 2, tied": ("llama-tied", "int8", {"parallel.tensor": 2}),
    "pipeline 2": ("llama", "int4", {"parallel.pipeline": 2}),
    "generic": ("llama", "int4", {"model.backend": "transformers"}),
    "generic, tied": ("llama-tied", "int4", {"model.backend": "transformers"}),
    "eager": ("llama", "int8", {"model.enforce_eager": True}),
    "n-grams": ("llama", "int8", {"drafts.method": "ngram"}),
}


@pytest.mark.parametrize("case", CASES)
def test_answers_equal_those_of_dequantized_weights(case: str, tmp_path: Path) -> None:
    family, form, settings = CASES[case]
    folder = make(tmp_path / "floats", family)
    dtype = getattr(torch, settings.get("model.dtype", "float32"))
    expected = answers_of(twin(folder, tmp_path / "twin", BITS[form], dtype), **settings)
    assert answers_of(folder, **settings, **{"model.quantize": form}) == expected


@pytest.mark.parametrize("form", BITS)
def test_integer_activations_are_near_and_batch_invariant(form: str, tmp_path: Path) -> None:
    folder, quantized = make(tmp_path / "m", "llama"), {"model.quantize": form}
    exact = answers_of(folder, **quantized)
    with engine(folder, **quantized, **{"model.activations": "int8"}) as llm:
        found = answers(llm)
        alone = [llm.generate([prompt], GREEDY)[0].outputs[0] for prompt in PROMPTS]
        assert [(list(each.token_ids), each.logprobs) for each in alone] == found
    assert found != exact
    for (ids, logprobs), (exact_ids, exact_logprobs) in zip(found, exact, strict=True):
        one, other = logprobs[0][ids[0]], exact_logprobs[0].get(ids[0])
        assert ids[0] == exact_ids[0] or other is not None
        if other is not None:
            assert math.isclose(_value(one), _value(other), abs_tol=0.2)


def _value(logprob: Any) -> float:
    return float(getattr(logprob, "logprob", logprob))


def config_of(folder: Path, **settings: Any) -> Config:
    model = {"model.device": "cpu", "cache.memory_bytes": 4_000_000, **settings}
    return load(str(folder), model)


def built(folder: Path, mesh: Mesh, **settings: Any) -> tuple[Any, ModelConfig]:
    config = config_of(folder, **settings).model
    return build_model(config, load_config(config), mesh, "cpu", torch.float32), config


def weights_of(model: Any) -> dict[str, Any]:
    layers = dict(model.named_modules())
    return {name: one.weight for name, one in layers.items() if isinstance(one, PackedWeight)}


def test_weights_that_are_quantized_while_they_are_loaded_equal_those_quantized_later(
    tmp_path: Path,
) -> None:
    """The last rank has padded rows, which no checkpoint fills: NaNs in them are replaced."""
    folder = make(tmp_path / "m", "llama-tied", vocab_size=513)
    for backend, form in (("native", "int4"), ("native", "int8"), ("transformers", "int4")):
        mesh = Mesh.build(ParallelConfig(tensor=2), 1)
        model, config = built(folder, mesh, **{"model.backend": backend})
        load_weights(model, config)
        packing = Packing(bits=BITS[form])
        sizes = pack_weights(model, packing)
        loaded, config = built(folder, mesh, **{"model.backend": backend})
        for parameter in loaded.parameters():
            parameter.fill_(torch.nan)
        nbytes = load_weights(loaded, config, packing=packing).nbytes
        assert nbytes == load_weights(*built(folder, mesh, **{"model.backend": backend})).nbytes - (
            sizes.before - sizes.after
        )
        assert pack_weights(loaded, packing) == (0, 0), "nothing is left to quantize"
        expected, found = weights_of(model), weights_of(loaded)
        assert list(found) == list(expected)
        for name, weight in found.items():
            other = expected[name]
            assert isinstance(weight, PackedQuantizedTensor) and weight.form == other.form, name
            assert torch.equal(weight.data, other.data), name


def test_a_rank_without_tokens_of_the_vocabulary_has_its_matrices(tmp_path: Path) -> None:
    """No shard fills its rows of the embedding and of the head."""
    folder = make(tmp_path / "m", "llama-tied")
    config = config_of(folder, **{"model.load_format": "dummy"}).model
    mesh, packing = Mesh.build(ParallelConfig(tensor=4), 3), Packing(bits=8)
    hf_config = load_config(config)
    hf_config.vocab_size = 9  # three ranks hold three tokens each
    hf_config.intermediate_size, hf_config.head_dim = 256, 32
    model: Any = build_model(config, hf_config, mesh, "cpu", torch.float32, packing=packing)
    assert model.head.weight.is_meta and model.head.tokens == 0
    load_weights(model, config, packing=packing)
    pack_weights(model, packing)
    assert not [name for name, each in model.named_parameters() if each.is_meta]
    assert isinstance(model.head.weight, PackedQuantizedTensor)


def test_a_worker_reports_the_bytes_of_quantized_weights(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", "llama")
    found: dict[str, int] = {}
    for form in ("none", *BITS):
        worker = Worker(config_of(folder, **{"model.quantize": form}))
        found[form] = worker.load()
        if form != "none":
            layers = dict(worker._built_model.named_modules())
            packed = [one for one in layers.values() if isinstance(one, PackedWeight)]
            weights = [one.weight for one in packed if not isinstance(one.weight, torch.Tensor)]
            assert all(isinstance(weight, PackedQuantizedTensor) for weight in weights)
            bits = {
                name: one.weight.form.bits
                for name, one in layers.items()
                if one in packed and isinstance(one.weight, PackedQuantizedTensor)
            }
            heads = {name for name in bits if "head" in name}
            assert len(heads) == 1 and len(bits) == 4 * 4 + 1
            assert all(bits[name] == (8 if name in heads else BITS[form]) for name in bits)
        worker.shutdown()
    embedding = 512 * 128 * 4
    assert found["int8"] - embedding < 0.28 * (found["none"] - embedding)
    assert found["int4"] < 0.85 * found["int8"]


def test_saved_weights_are_quantized_when_they_are_loaded(tmp_path: Path) -> None:
    """Saved weights are packed floats, which are mapped. They are not mapped after they are
    quantized."""
    folder, out = make(tmp_path / "m", "llama"), tmp_path / "saved"
    save_sharded(config_of(folder), out, lambda *_: None)
    quantized = {"model.quantize": "int4"}
    assert answers_of(out, **quantized) == answers_of(folder, **quantized)
    worker = Worker(config_of(out, **quantized))
    worker.load()
    assert worker._mapped_bytes < 1.2 * 512 * 128 * 4
    worker.shutdown()


def test_adapters_are_added_to_products_with_quantized_weights(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", "llama")
    model = tiny_models.make(tmp_path / "shapes", "llama", **SIZES)
    shapes = adapters.module_shapes(model)
    adapter = str(adapters.make_adapter(tmp_path / "adapter", shapes, seed=3))
    settings = {"lora.adapters": {"one": adapter}}
    with engine(twin(folder, tmp_path / "twin", 4), **settings) as llm:
        expected = answers(llm, adapter="one")
        plain = answers(llm)
    with engine(folder, **settings, **{"model.quantize": "int4"}) as llm:
        assert answers(llm, adapter="one") == expected != plain
        assert answers(llm) == plain


@pytest.mark.parametrize("level", [1, 2])
def test_quantized_weights_sleep_and_are_replaced(level: int, tmp_path: Path) -> None:
    old, new = make(tmp_path / "old", "llama"), make(tmp_path / "new", "llama", seed=2)
    quantized = {"model.quantize": "int8"}
    expected = answers_of(new, **quantized)
    with engine(old, **quantized) as llm:
        before = answers(llm)
        llm.sleep(level=level)
        llm.wake_up()
        assert answers(llm) == before
        llm.update_weights(str(new))
        assert answers(llm) == expected != before


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(ValueError, match=r"model\.quantize") as error:
        call()
    return str(error.value)


def test_refusals(tmp_path: Path) -> None:
    odd = make(tmp_path / "odd", "llama", intermediate_size=96)

    def load_odd(**settings: Any) -> str:
        worker = Worker(config_of(odd, **{"model.quantize": "int4", **settings}))
        return refusal(worker.load)

    text = load_odd(**{"parallel.tensor": 2})
    assert "down" in text and "has 48 inputs in each worker" in text and "parallel.tensor" in text
    assert "needs model.dtype=float32 or bfloat16" in load_odd(**{"model.dtype": "float16"})
    config = config_of(odd, **{"model.quantize": "int8"})
    assert "set model.quantize=none to save" in refusal(
        lambda: save_sharded(config, tmp_path / "out", lambda *_: None)
    )


@pytest.mark.parametrize("form", ["keep", *BITS])
def test_a_gpu_computes_with_exact_activations_of_each_type(form: str) -> None:
    gpu = torch.device("cuda")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        config = ModelConfig(path="m", quantize=form)
        packing = Packing.of(config, gpu, dtype)
        assert (packing.bits, packing.keeps_integers) == (BITS.get(form), form == "keep")
        assert Packing.of(ModelConfig(path="m", activations="int8"), gpu, dtype).bits is None
        chosen = ModelConfig(path="m", quantize=form, activations="auto")
        assert Packing.of(chosen, gpu, dtype) == packing
        rounded = ModelConfig(path="m", quantize=form, activations="int8")
        with pytest.raises(ValueError, match=r"model\.activations=int8: only CPUs") as error:
            Packing.of(rounded, gpu, dtype)
        assert "set model.activations=exact" in str(error.value)


@pytest.mark.parametrize(
    ("given", "dtype", "capability", "why"),
    [
        ({}, torch.bfloat16, (8, 9), None),
        ({}, torch.bfloat16, (9, 0), None),
        ({}, torch.bfloat16, (8, 6), r"8\.9 or later, but this one has 8\.6"),
        ({}, torch.float16, (9, 0), "set model.dtype=bfloat16"),
        ({"quantize": "int8"}, torch.bfloat16, (9, 0), "set model.quantize=keep"),
        ({"exact": True}, torch.bfloat16, (9, 0), "depend on the batch"),
    ],
    ids=str,
)
def test_a_gpu_rounds_activations_to_fp8_for_weights_in_fp8(
    given: dict[str, Any],
    dtype: torch.dtype,
    capability: tuple[int, int],
    why: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    config = ModelConfig(path="m", activations="fp8", **{"quantize": "keep", **given})
    if why is None:
        assert Packing.of(config, torch.device("cuda"), dtype).rounded_group == 256
    else:
        with pytest.raises(ValueError, match=f"model.activations=fp8 .*{why}"):
            Packing.of(config, torch.device("cuda"), dtype)
    with pytest.raises(ValueError, match="needs a GPU"):
        Packing.of(config, torch.device("cpu"), torch.bfloat16)


@pytest.mark.parametrize(("activations", "largest"), [("exact", 0), ("auto", 64), ("int8", 256)])
def test_the_groups_whose_inputs_are_rounded(activations: str, largest: int) -> None:
    config = load("m", {"model.quantize": "keep", "model.activations": activations}).model
    packing = Packing.of(config, torch.device("cpu"), torch.float32)
    for group in GROUPS:
        scales = torch.ones(32, 256 // group)
        weight = QuantizedTensor(torch.zeros(32, 256, dtype=torch.uint8), scales, None, 8)
        rounded = packing.pack(weight, torch.float32).rounded_activations
        assert rounded == (group <= largest)
