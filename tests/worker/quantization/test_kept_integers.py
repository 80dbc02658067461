"""`model.quantize=keep`: products use the integers of a quantized checkpoint. Answers equal those
of the dequantized copy to the last bit."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from swell.cluster.local import LLM
from swell.configs.schema import load
from swell.kernels.linear import panel
from swell.kernels.weights.quantized import (
    INTEGERS,
    Numbers,
    PackedQuantizedTensor,
    QuantizedTensor,
)
from swell.worker import loader
from swell.worker.checkpoint.checkpoint import Index
from swell.worker.layers import packed_weight
from swell.worker.layers.linear import ReplicatedLinear
from swell.worker.layers.moe import MoE
from swell.worker.layers.packed_weight import PackedWeight, Packing, named_matrices
from swell.worker.layers.weight_shard import ALL, WeightShard, materialize
from swell.worker.memory.uploads import Uploads
from swell.worker.quantization.loaded_matrices import QuantizedMatrices
from swell.worker.worker import Worker
from tests.worker.memory.late_gpu import LateGpu, late_gpu
from tests.worker.quantization import writers
from tests.worker.quantization.copies import answers, answers_of, copies, is_projection

__all__ = ["late_gpu"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(panel("cpu") is None, reason="no compiler: only a slow backend computes"),
]

ON_CPU = {"model.device": "cpu"}
KEEP = {"model.quantize": "keep", **ON_CPU}
SIZES = {"intermediate_size": 256}
KEPT = {
    # format -> bits
    **dict.fromkeys(("gptq", "gptq-v2", "gptq-symmetric-zeros", "awq"), 4),
    **dict.fromkeys(("ct-w4a16", "ct-w4a16-asymmetric", "ct-w4a16-channel"), 4),
    **dict.fromkeys(("gptq-8", "ct-w8a16", "ct-int8", "ct-int8-asymmetric"), 8),
    **dict.fromkeys(("ct-nvfp4", "ct-mxfp4", "modelopt-nvfp4"), 8),
}
DEQUANTIZED = ["gptq-asymmetric-ordered", "gptq-3", "ct-w4a16-ordered", "fp8-block"]


def kept(folder: Path, **settings: Any) -> list[int]:
    """Returns the bits of the quantized weights in the layers of a loaded model."""
    config = load(str(folder), {"model.dtype": "float32", **KEEP, **settings})
    worker = Worker(config)
    worker.load()
    assert worker.model is not None
    layers = [module for module in worker.model.modules() if isinstance(module, PackedWeight)]
    weights = [layer.weight for layer in layers]
    return [each.form.bits for each in weights if isinstance(each, PackedQuantizedTensor)]


def weights_of(folder: Path) -> list[torch.Tensor]:
    """Returns the data of the quantized weights of a loaded model."""
    worker = Worker(load(str(folder), {"model.dtype": "float32", **KEEP}))
    worker.load()
    assert worker.model is not None
    layers = [module for module in worker.model.modules() if isinstance(module, PackedWeight)]
    weights = [layer.weight for layer in layers]
    return [each.data for each in weights if isinstance(each, PackedQuantizedTensor)]


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize("name", KEPT)
def test_integers_are_kept(name: str, backend: str, tmp_path: Path) -> None:
    quantized, plain = copies(tmp_path, writers.FORMATS[name], **SIZES)
    settings = {"model.backend": backend, "model.device": "cpu"}
    assert answers(quantized, **{**settings, **KEEP}) == answers(plain, **settings)
    layers = 2 * (4 if backend == "native" else 7)
    assert kept(quantized, **settings) == [KEPT[name]] * layers


@pytest.mark.parametrize("intermediate_size", [1024, 576])
@pytest.mark.parametrize("name", ["ct-int8", "ct-w4a16-channel"])
def test_large_groups_are_kept(name: str, intermediate_size: int, tmp_path: Path) -> None:
    """Products have groups of at most 256 inputs: a larger one becomes several with one scale."""
    quantized, plain = copies(tmp_path, writers.FORMATS[name], intermediate_size=intermediate_size)
    assert answers(quantized, **KEEP) == answers(plain, **ON_CPU)
    assert len(kept(quantized)) == 2 * 4
    rounded = answers(quantized, **{**KEEP, "model.activations": "int8"})
    assert [len(tokens) for tokens, _ in rounded] == [8] * 3


@pytest.mark.parametrize(
    ("name", "same"), [("awq", "int8"), ("gptq-8", "int8"), ("ct-int8", "exact")]
)
def test_auto_rounds_the_inputs_of_small_groups(name: str, same: str, tmp_path: Path) -> None:
    """awq has groups of 32 inputs here, gptq-8 of 64, and ct-int8 of 128 and 256."""
    folder, _ = copies(tmp_path, writers.FORMATS[name], **SIZES)
    found = {
        each: answers(folder, **KEEP, **{"model.activations": each})
        for each in ("auto", "exact", "int8")
    }
    assert found["exact"] != found["int8"]
    assert found["auto"] == found[same]


@pytest.mark.parametrize("name", DEQUANTIZED)
def test_other_matrices_are_dequantized(name: str, tmp_path: Path) -> None:
    quantized, plain = copies(tmp_path, writers.FORMATS[name], **SIZES)
    assert answers(quantized, **KEEP) == answers(plain, **ON_CPU)
    assert kept(quantized) == []


@pytest.mark.parametrize("name", ["fp8-block", "gptq-3"])
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_quantized_checkpoint_is_rounded_to_another_form(
    quantize: str, name: str, tmp_path: Path
) -> None:
    """The dequantized weights are rounded, matrix by matrix."""
    quantized, plain = copies(tmp_path, writers.FORMATS[name], **SIZES)
    settings = {"model.quantize": quantize, **ON_CPU}
    assert answers(quantized, **settings) == answers(plain, **settings)


@pytest.mark.parametrize("name", ["gptq", "awq", "ct-w4a16-channel", "ct-int8", "ct-nvfp4"])
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_ranks_keep_their_parts(name: str, axis: str, tmp_path: Path) -> None:
    quantized, plain = copies(tmp_path, writers.FORMATS[name], **SIZES)
    settings = {f"parallel.{axis}": 2, "model.device": "cpu"}
    assert answers(quantized, **{**settings, **KEEP}) == answers(plain, **settings)


def test_a_part_that_ends_within_a_group_is_dequantized(tmp_path: Path) -> None:
    """Each rank has 96 inputs of the last matrix, which are one and a half groups of 64."""
    quantized, plain = copies(tmp_path, writers.FORMATS["ct-w8a16"])
    settings = {"parallel.tensor": 2, "model.device": "cpu"}
    assert answers(quantized, **{**settings, **KEEP}) == answers(plain, **settings)


def test_layers_with_several_forms_are_dequantized(tmp_path: Path) -> None:
    """Queries are not quantized, so the product of queries, keys and values is not, either."""
    quantized, plain = copies(
        tmp_path,
        writers.FORMATS["gptq"],
        quantized=lambda name, _: name.endswith(("k_proj.weight", "down_proj.weight")),
        **SIZES,
    )
    assert answers(quantized, **KEEP) == answers(plain, **ON_CPU)
    assert kept(quantized) == [4, 4]
    assert kept(quantized, **{"model.backend": "transformers"}) == [4] * 4


class Stored:
    """A stored matrix with groups of some size."""

    file, description = Path("m"), "m"

    def __init__(self, group: int, mins: bool) -> None:
        self.shape = (32, 128)
        integers = torch.randint(0, 256, self.shape, dtype=torch.uint8)
        scales, low = torch.rand(2, 32, 128 // group)
        self.weight = QuantizedTensor(integers, scales, low if mins else None, 8)

    def read(self, index: Index, dtype: torch.dtype) -> torch.Tensor:
        return self.weight.dequantize(dtype)[index]

    def read_quantized(
        self, index: Index, computed: Collection[Numbers] = INTEGERS
    ) -> QuantizedTensor | str:
        return self.weight


def test_matrices_with_other_groups_are_joined() -> None:
    """The parts of a layer get the groups of the smallest."""
    torch.manual_seed(0)
    layer = ReplicatedLinear(128, 4 * 32, bias=False)
    materialize(layer, torch.device("cpu"), torch.float32)
    stored = [Stored(32, False), Stored(16, False), Stored(64, True), Stored(128, False)]
    needed = [
        (each, WeightShard("m", layer.weight[row : row + 32], (ALL, ALL), (32, 128)))
        for row, each in zip(range(0, 128, 32), stored, strict=True)
    ]
    named = named_matrices(torch.nn.Sequential(layer))
    matrices = QuantizedMatrices(named, Packing(keeps_integers=True), torch.device("cpu"))
    assert matrices.keep(needed, Uploads(torch.device("cpu")))
    assert layer.weight.form.group == 16
    found = layer.weight.unpack().dequantize(torch.float32)
    expected = torch.cat([each.weight.dequantize(torch.float32) for each in stored])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def logged(folder: Path, caplog: pytest.LogCaptureFixture, **settings: Any) -> dict[str, Any]:
    """Returns the fields of the line about quantized matrices."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "swell"):
        Worker(load(str(folder), {"model.dtype": "float32", **ON_CPU, **settings})).load()
    lines = [one for one in caplog.records if one.message == "matrices that are quantized"]
    assert len(lines) <= 1
    return lines[0].fields if lines else {}


def test_the_log_lists_the_forms_of_matrices(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, plain = copies(
        tmp_path,
        writers.FORMATS["gptq"],
        quantized=lambda name, _: name.endswith(("k_proj.weight", "down_proj.weight")),
        **SIZES,
    )
    int4, floats = "int4 in groups of 32 (float16 scales)", "stored as floats"
    fields = logged(quantized, caplog, **KEEP)
    assert fields == {"forms": [f"2 {int4}"], "plain": [f"8 {floats}"]}
    fields = logged(plain, caplog, **KEEP)
    assert fields == {"forms": [], "plain": [f"10 {floats}"]}
    fields = logged(plain, caplog, **{"model.quantize": "int4"})
    assert fields == {
        "forms": [
            "8 int4 in groups of 32 (float16 scales)",
            "1 int8 in groups of 32 (float16 scales)",
        ],
        "plain": ["1 never quantized (VocabParallelEmbedding)"],
    }
    rounded = {"model.quantize": "int8", "model.activations": "auto"}
    assert logged(plain, caplog, **rounded)["forms"] == [
        "9 int8 in groups of 32 (float16 scales), inputs rounded"
    ]
    assert logged(plain, caplog) == {}
    (tmp_path / "experts").mkdir()
    experts, _ = copies(tmp_path / "experts", writers.FORMATS["gptq"], "qwen3_moe", **SIZES)
    fields = logged(experts, caplog, **KEEP)
    assert fields == {"forms": [f"{2 * (2 + 2 * 4)} {int4}"], "plain": [f"4 {floats}"]}
    (tmp_path / "other").mkdir()
    ordered, _ = copies(tmp_path / "other", writers.FORMATS["gptq-3"], **SIZES)
    fields = logged(ordered, caplog, **KEEP)
    assert fields == {"forms": [], "plain": ["8 stored as gptq, 3 bits", f"2 {floats}"]}


def test_a_quantized_router_keeps_the_type_of_its_experts(tmp_path: Path) -> None:
    quantized, plain = copies(
        tmp_path,
        writers.FORMATS["gptq"],
        "qwen3_moe",
        lambda name, tensor: is_projection(name, tensor) or name.endswith("mlp.gate.weight"),
        num_experts=8,
        **SIZES,
    )
    found = []
    for folder, settings in ((plain, ON_CPU), (quantized, KEEP)):
        worker = Worker(load(str(folder), {"model.dtype": "float32", **settings}))
        worker.load()
        assert worker.model is not None
        layers = [module for module in worker.model.modules() if isinstance(module, MoE)]
        routers = [isinstance(layer.router.weight, PackedQuantizedTensor) for layer in layers]
        assert routers == [settings is KEEP] * 2
        found.append([(layer.expert_bytes, *layer.make_expert()) for layer in layers])
    for (size, *parts), (kept_size, *kept_parts) in zip(*found, strict=True):
        assert size == kept_size
        assert [part.shape for part in parts] == [part.shape for part in kept_parts]
        assert {part.dtype for part in kept_parts} == {torch.float32}
    assert answers(quantized, **KEEP) == answers(plain, **ON_CPU)


def test_bfloat16_heads_embeddings_and_new_weights(tmp_path: Path) -> None:
    """In bfloat16 the exact values are rounded once, as when they are dequantized."""
    form = writers.FORMATS["ct-int8"]
    quantized, plain = copies(
        tmp_path, form, "llama-tied", lambda name, tensor: tensor.dim() == 2, **SIZES
    )
    assert len(kept(quantized)) == 2 * 4 + 2
    settings = {"model.dtype": "bfloat16", "model.device": "cpu"}
    expected = answers(quantized, **settings)
    assert answers(quantized, **{**settings, **KEEP}) == expected
    values = {"cache.memory_bytes": 2_000_000, **settings, **KEEP}
    with LLM(str(plain), **values) as llm:
        assert answers_of(llm) != []
        llm.update_weights(str(quantized))
        assert answers_of(llm) == expected
        llm.sleep(1)
        llm.wake_up()
        assert answers_of(llm) == expected


def test_the_weights_of_a_worker_are_smaller(tmp_path: Path) -> None:
    quantized, _ = copies(tmp_path, writers.FORMATS["gptq"], **SIZES)
    config = {"model.dtype": "float32", "model.device": "cpu"}
    plain_bytes = Worker(load(str(quantized), config)).load()
    kept_bytes = Worker(load(str(quantized), {**config, **KEEP})).load()
    matrices = 2 * (128 * 128 * 2 + 128 * 64 * 2 + 128 * 256 * 3)
    assert plain_bytes - kept_bytes == pytest.approx(matrices * (32 - 4.5) / 8, rel=0.01)


@pytest.mark.parametrize("name", ["gptq-8", "awq"])
def test_integers_reach_a_gpu_through_locked_buffers(
    name: str, late_gpu: LateGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device packs them after their copies."""
    quantized, _ = copies(tmp_path, writers.FORMATS[name], **SIZES)
    expected = weights_of(quantized)
    pack = packed_weight.pack_quantized

    def pack_later(*args: Any) -> PackedQuantizedTensor:
        late_gpu.finish(late_gpu.num_queued)
        return pack(*args)

    monkeypatch.setattr(loader, "Uploads", lambda _device: Uploads(torch.device("cuda")))
    monkeypatch.setattr(packed_weight, "pack_quantized", pack_later)
    found = weights_of(quantized)
    assert late_gpu.num_queued >= 2 * len(found) > 0 and not late_gpu.locked
    assert [torch.equal(*pair) for pair in zip(found, expected, strict=True)] == [True] * 8
