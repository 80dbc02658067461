"""The memory that a worker needs while it builds and loads a model whose weights are quantized: the
quantized model, and one matrix of floats. Measured in bytes, in a process of its own.

Allocated bytes count before they are written, as on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch

from swell.configs.schema import ParallelConfig, load
from swell.kernels.linear import panel
from swell.kernels.weights.quantized import GROUP, QuantizedForm
from swell.worker.comm.mesh import Mesh
from swell.worker.hf_config import load_config
from swell.worker.layers.packed_weight import PackedWeight, Packing
from swell.worker.models import build_model
from tests.worker import tiny_models
from tests.worker.quantization import writers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(panel("cpu") is None, reason="no compiler: only a slow backend computes"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

MIB, GIB = 2**20, 2**30
LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 5, "vocab_size": 512}
SMALL = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 60, "vocab_size": 512}
"""Matrices so small that the heap of the C library holds them."""
EXPERTS = {
    "hidden_size": 1024,
    "num_experts": 16,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 3,
    "vocab_size": 512,
}

MEASURE = """
import json, os, sys
from pathlib import Path
from swell.configs.schema import load
from swell.worker import worker as module
from swell.worker.moe.experts import rebalance
from transformers import LlamaForCausalLM, Qwen3MoeForCausalLM

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ":")) * 1024

def measure(path, settings):
    anonymous, allocated, first, build = [], [], {}, module.build_model

    def build_and_begin(*arguments):
        first["VmData"] = status("VmData")
        model = build(*arguments)
        allocated.append(status("VmData"))
        Path("/proc/self/clear_refs").write_text("5")  # the peak of the resident memory begins here
        first.update({key: status(key) for key in ("RssAnon", "VmHWM")})
        return model

    def on_progress(message):
        anonymous.append(status("RssAnon"))
        allocated.append(status("VmData"))

    module.build_model = build_and_begin
    settings = {"model.device": "cpu", "model.dtype": "float32", **settings}
    worker = module.Worker(load(path, settings), progress=on_progress)
    nbytes = worker.load()
    if worker.config.parallel.expert:  # they come when the engines share them
        rebalance(worker.model, worker.mesh, worker.config.model, lambda: None)
        for layer in worker.model.moe_layers():
            parts = [part for pair in layer.local_experts.values() for part in pair]
            nbytes += sum(part.data.nbytes for part in parts)
    return {
        "nbytes": nbytes,
        "peak_allocated": max(allocated) - first["VmData"],
        "peak_anonymous": max(anonymous) - first["RssAnon"],
        "peak": status("VmHWM") - first["VmHWM"],
    }

for line in sys.stdin:
    child = os.fork()
    if not child:
        print("measured", json.dumps(measure(*json.loads(line))), flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print("failed", flush=True)
"""
"""The program of a process that imports everything once, and measures in a process of its own for
each line."""

Measure = Callable[..., dict[str, int]]


@pytest.fixture(scope="module")
def measure() -> Iterator[Measure]:
    command = [sys.executable, "-c", MEASURE]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        requests, results = server.stdin, server.stdout

        def measured(path: Path, **settings: Any) -> dict[str, int]:
            requests.write(json.dumps([str(path), settings]) + "\n")
            requests.flush()
            outcome = ""
            while outcome not in ("measured", "failed"):
                line = results.readline()
                assert line, "the process has ended"
                outcome, _, result = line.strip().partition(" ")
            assert outcome == "measured", "its exception is in the captured output"
            found: dict[str, int] = json.loads(result)
            return found

        yield measured
        server.kill()


def largest_matrix(sizes: dict[str, int]) -> int:
    """The bytes of the gate and up projections, which are one matrix."""
    return 2 * sizes["intermediate_size"] * sizes["hidden_size"] * 4


def mapped_bytes(folder: Path) -> int:
    """The bytes of the weights' files, which the system counts as allocated."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.parametrize("backend", ["native", "transformers"])
@pytest.mark.parametrize(("form", "sizes"), [("int8", SMALL), ("int4", LARGE)])
def test_random_weights(
    form: str, sizes: dict[str, int], backend: str, tmp_path: Path, measure: Measure
) -> None:
    """All resident memory counts: no file is read."""
    tiny_models.make(tmp_path, "llama", **sizes)
    settings = {"model.load_format": "dummy", "model.backend": backend}
    found = measure(tmp_path, **settings, **{"model.quantize": form})
    # A matrix of floats, as many random numbers, its integers, and what the code itself needs; all
    # floats take 300 MB.
    most = found["nbytes"] + 3 * largest_matrix(sizes) + 40 * MIB
    assert found["peak"] < most
    assert found["peak_allocated"] < most + 20 * MIB, "the classes of transformers are loaded, too"


@pytest.mark.parametrize("case", ["own", "shared", "generic"])
def test_random_experts(case: str, tmp_path: Path, measure: Measure) -> None:
    """Experts of one engine, and those that engines share, which are loaded later."""
    tiny_models.make(tmp_path, "qwen3_moe", **EXPERTS)
    settings: dict[str, Any] = {"model.load_format": "dummy", "parallel.expert": case == "shared"}
    settings["model.backend"] = "transformers" if case == "generic" else "native"
    found = measure(tmp_path, **settings, **{"model.quantize": "int8"})
    # All floats take 300 MB.
    assert found["peak"] < found["nbytes"] + 60 * MIB


@pytest.mark.parametrize("sizes", [LARGE, SMALL], ids=["large", "small"])
def test_stored_weights(sizes: dict[str, int], tmp_path: Path, measure: Measure) -> None:
    """Pages of mapped files are not counted."""
    tiny_models.make(tmp_path, "llama", **sizes)
    found = measure(tmp_path, **{"model.quantize": "int8"})
    most = found["nbytes"] + 2 * largest_matrix(sizes) + 40 * MIB
    assert found["peak_anonymous"] < most
    assert found["peak_allocated"] - mapped_bytes(tmp_path) < most


def test_kept_integers(tmp_path: Path, measure: Measure) -> None:
    source, out = tmp_path / "source", (tmp_path / "quantized", tmp_path / "plain")
    tiny_models.make(source, "llama", **LARGE)
    form = writers.FORMATS["gptq-8"]
    writers.quantize_folder(source, form, lambda name, _: name.endswith("proj.weight"), out)
    found = measure(out[0], **{"model.quantize": "keep"})
    most = found["nbytes"] + 2 * largest_matrix(LARGE) + 40 * MIB
    assert found["peak_anonymous"] < most
    assert found["peak_allocated"] - mapped_bytes(out[0]) < most


SIZES_OF_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_70_billion_parameters_in_int4_load_on_a_card_of_80_gb(
    backend: str, tmp_path: Path
) -> None:
    """The bytes follow from the shapes: matrices get their memory when they are loaded."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES_OF_70B}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {"model.device": "cpu", "model.quantize": "int4", "model.load_format": "dummy"}
    served = load(str(tmp_path), settings).model
    packing = Packing(bits=4)
    mesh = Mesh.build(ParallelConfig(), 0)
    model: Any = build_model(
        served, load_config(served), mesh, "cpu", torch.bfloat16, packing=packing
    )
    parameters = list(model.parameters())
    assert sum(each.nbytes for each in parameters) > 140e9
    resident = sum(each.nbytes for each in parameters if not each.is_meta)
    packed = {
        id(module.weight): (module.weight, module.quantized_bits(packing))
        for module in model.modules()
        if isinstance(module, PackedWeight)
    }
    late = [(weight, bits) for weight, bits in packed.values() if weight.is_meta]
    loaded = resident + sum(
        weight.nbytes
        if bits is None
        else weight.numel()
        // GROUP
        * QuantizedForm(bits, GROUP, False, torch.float16).block_bytes(1)
        for weight, bits in late
    )
    # Its floats and integers, its random numbers in float32, and what the conversion of rows needs.
    one = 4 * max(weight.nbytes for weight, _ in late) + GIB
    assert loaded + one < 80e9, (resident, loaded, one)
