"""A GGUF file gives the tokens of the folder from which it was written, with its weights rounded in
the same way."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from swell.cluster.local import LLM, SamplingParams
from swell.configs.files.gguf.header import read_header
from swell.configs.files.model_path import local_folder
from swell.configs.schema import load
from swell.kernels.weights.quantized import PackedQuantizedTensor, QuantizedTensor
from swell.worker.checkpoint.checkpoint import CUT_GROUP
from swell.worker.checkpoint.gguf.checkpoint import PIECE_NUMBERS, GgufCheckpoint
from swell.worker.layers.packed_weight import PackedWeight
from swell.worker.worker import Worker
from tests.support.gguf.files import gguf_of, twin_of
from tests.support.paths import NANO
from tests.support.weights import adapters
from tests.worker.tiny_models import FAMILIES, SIZES, WINDOW

PROMPTS = ["<|user|>add 2 3<|end|><|assistant|>", "a b c", "The last one", "x" * 40]
GEMMA_3 = {
    "head_dim": 32,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 32,
    "num_hidden_layers": 7,
    "tie_word_embeddings": True,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "head_dim": 48}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": FAMILIES["qwen2"],
    "qwen3": FAMILIES["qwen3"],
    "qwen3moe": (
        "qwen3_moe",
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 96,
            "norm_topk_prob": True,
        },
    ),
    "phi3": FAMILIES["phi3"],
    "gemma2": ("gemma2", {**FAMILIES["gemma2"][1], "tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", GEMMA_3),
}


def random_folder(folder: Path, name: str) -> Path:
    """Saves a random model with the tokenizer of nano. Its norms and biases are random too."""
    kind, differs = MODELS[name]
    config = AutoConfig.for_model(kind, **{**SIZES, **differs})
    with torch.random.fork_rng():
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    random = np.random.default_rng(3)
    for key, numbers in weights.items():
        if numbers.ndim == 1:
            noise = random.integers(-64, 64, numbers.shape) / 256  # exact in Gemma's 1 + w
            weights[key] = (numbers + noise).astype(np.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(NANO, file), folder)
    return folder


def greedy(model: Path, **options: Any) -> list[tuple[Sequence[int], Any]]:
    """Returns the tokens of each answer and their probabilities."""
    settings = {
        "model.device": "cpu",
        "model.dtype": "float32",
        "cache.memory_bytes": 4_000_000,
        **options,
    }
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    with LLM(str(model), **settings) as llm:
        return [
            (answer.outputs[0].token_ids, answer.outputs[0].cumulative_logprob)
            for answer in llm.generate(PROMPTS, params)
        ]


@pytest.mark.parametrize("name", MODELS)
def test_an_architecture_generates_the_same_tokens_as_its_folder(name: str, tmp_path: Path) -> None:
    folder = random_folder(tmp_path / "folder", name)
    file = gguf_of(folder, tmp_path / "m.gguf")
    assert greedy(file) == greedy(folder)


@pytest.mark.parametrize("name", ["llama", "qwen3moe", "gemma3"])
def test_an_architecture_generates_the_same_tokens_as_its_folder_in_transformers(
    name: str, tmp_path: Path
) -> None:
    folder = random_folder(tmp_path / "folder", name)
    file = gguf_of(folder, tmp_path / "m.gguf")
    own = {"model.backend": "transformers"}
    assert greedy(file, **own) == greedy(folder, **own)


@pytest.mark.parametrize("name", MODELS)
def test_a_config_equals_the_folders(name: str, tmp_path: Path) -> None:
    folder = random_folder(tmp_path / "folder", name)
    small = local_folder(str(gguf_of(folder, tmp_path / "m.gguf")))
    assert small is not None
    expected, found = (AutoConfig.from_pretrained(path).to_dict() for path in (folder, small))
    unused = {
        "_name_or_path",
        "initializer_range",
        "transformers_version",
        "pretraining_tp",
        "max_window_layers",
        "router_aux_loss_coef",
    }
    for key in expected.keys() - unused:
        want, have = expected[key], found.get(key)
        if key == "eos_token_id":
            want = [want, 260]  # <|end|>
        if key == "head_dim" and want is None:
            want = expected["hidden_size"] // expected["num_attention_heads"]
        assert have == want, key


@pytest.mark.parametrize("name", MODELS)
def test_every_part_of_a_tensor_equals_the_folders(name: str, tmp_path: Path) -> None:
    folder = random_folder(tmp_path / "folder", name)
    weights = load_file(folder / "model.safetensors")
    checkpoint = GgufCheckpoint(gguf_of(folder, tmp_path / "m.gguf"))
    random = np.random.default_rng(9)
    assert set(checkpoint.names) == weights.keys()
    for key, numbers in weights.items():
        tensor = checkpoint.tensor(key)
        assert tensor.shape == numbers.shape
        for _ in range(4):
            ends = [sorted(random.integers(0, length + 1, 2)) for length in numbers.shape]
            part = tuple(slice(int(a), int(b)) for a, b in ends)
            found = tensor.read(part, torch.float32)
            np.testing.assert_array_equal(found.numpy(), numbers[part])
        first = (int(random.integers(len(numbers))), *(slice(None),) * (numbers.ndim - 1))
        np.testing.assert_array_equal(tensor.read(first, torch.float32).numpy(), numbers[first])
        np.testing.assert_array_equal(tensor.read((), torch.float32).numpy(), numbers)
    checkpoint.close()


KINDS = [
    ("F16",),
    ("BF16",),
    ("Q8_0",),
    ("Q4_0",),
    ("Q4_1",),
    ("Q5_0",),
    ("Q5_1",),
    ("Q2_K", "Q4_0"),
    ("Q3_K", "Q4_0"),
    ("Q4_K", "Q5_0"),
    ("Q5_K", "Q8_0"),
    ("Q6_K", "Q8_0"),
]


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_nano_generates_the_same_tokens_as_its_rounded_twin(
    kinds: Sequence[str], tmp_path: Path
) -> None:
    file = gguf_of(Path(NANO), tmp_path / "m.gguf", kinds)
    twin = twin_of(Path(NANO), tmp_path / "twin", kinds)
    assert greedy(file) == greedy(twin)


@pytest.mark.parametrize(
    "options",
    [
        {"parallel.tensor": 2},
        {"parallel.pipeline": 2},
        {"parallel.tensor": 2, "model.backend": "transformers"},
        {"parallel.tensor": 2, "model.dtype": "bfloat16"},
    ],
    ids=str,
)
@pytest.mark.parametrize("kinds", [("Q4_0",), ("Q4_K", "Q5_0")], ids="+".join)
def test_workers_read_their_parts(
    kinds: Sequence[str], options: dict[str, Any], tmp_path: Path
) -> None:
    """Four ranks would cut the blocks of 256 numbers; two ranks cut rows of 512 between blocks."""
    file = gguf_of(Path(NANO), tmp_path / "m.gguf", kinds)
    twin = twin_of(Path(NANO), tmp_path / "twin", kinds)
    assert greedy(file, **options) == greedy(twin, **options)


@pytest.mark.parametrize("kinds", [("Q4_K", "Q5_0"), ("Q8_0",)], ids="+".join)
def test_a_part_may_cut_blocks(kinds: Sequence[str], tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(gguf_of(Path(NANO), tmp_path / "m.gguf", kinds))
    twin = load_file(twin_of(Path(NANO), tmp_path / "twin", kinds) / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    for columns in (slice(0, 1), slice(100, 300), slice(255, 257), slice(511, 512)):
        found = checkpoint.tensor(name).read((slice(3, 90), columns), torch.float32)
        np.testing.assert_array_equal(found.numpy(), twin[name][3:90, columns])
    checkpoint.close()


def test_a_large_tensor_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gguf_of(Path(NANO), tmp_path / "m.gguf", ("Q8_0",))
    checkpoint = GgufCheckpoint(whole)
    expected = {name: checkpoint.tensor(name).read((), torch.float32) for name in checkpoint.names}
    assert max(tensor.numel() for tensor in expected.values()) < PIECE_NUMBERS
    monkeypatch.setattr("swell.worker.checkpoint.gguf.checkpoint.PIECE_NUMBERS", 1000)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.tensor(name).read((), torch.float32), tensor)
    checkpoint.close()


def test_a_split_file_generates_the_same_tokens_as_the_whole(tmp_path: Path) -> None:
    whole = gguf_of(Path(NANO), tmp_path / "m.gguf", ("Q8_0",))
    first = gguf_of(Path(NANO), tmp_path / "m.gguf", ("Q8_0",), parts=3)
    assert greedy(first) == greedy(whole)


def test_a_file_that_becomes_shorter_is_refused(tmp_path: Path) -> None:
    file = gguf_of(Path(NANO), tmp_path / "m.gguf", ("Q8_0",))
    checkpoint = GgufCheckpoint(file)
    file.write_bytes(file.read_bytes()[:200_000])
    last = checkpoint.tensor(list(checkpoint.names)[-1])
    with pytest.raises(ValueError, match=r"m\.gguf cannot be read: it became shorter"):
        last.read((), torch.float32)
    checkpoint.close()


KEPT_KINDS = [
    ("Q8_0",),
    ("Q4_0",),
    ("Q4_1",),
    ("Q5_0",),
    ("Q5_1",),
    ("Q4_K", "Q5_0"),
    ("Q5_K", "Q8_0"),
    ("Q6_K", "Q8_0"),
]


@pytest.mark.parametrize("kinds", KEPT_KINDS, ids="+".join)
def test_integers_have_the_values_of_the_numbers(kinds: Sequence[str], tmp_path: Path) -> None:
    """Parts begin and end with groups, also within blocks and within heads that are rotated."""
    checkpoint = GgufCheckpoint(gguf_of(Path(NANO), tmp_path / "m.gguf", kinds))
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"):
        tensor = checkpoint.tensor(f"model.layers.0.{name}.weight")
        outs, size = tensor.shape
        for part in (
            (slice(None), slice(None)),
            (slice(3, outs - 5), slice(32, size - 32)),
            (slice(outs // 2, None), slice(size // 2, size // 2 + 64)),
        ):
            kept = tensor.read_quantized(part)
            own = kinds[0] if size % 256 == 0 else kinds[-1]
            assert isinstance(kept, QuantizedTensor) and kept.bits == (
                4 if own.startswith("Q4") else 8
            )
            expected = tensor.read(part, torch.float32)
            torch.testing.assert_close(
                kept.dequantize(torch.float32), expected, rtol=1e-6, atol=1e-7
            )
            if kept.mins is None:
                assert torch.equal(kept.dequantize(torch.float32), expected)
        assert tensor.read_quantized((slice(None), slice(0, 40))) == CUT_GROUP
    norm = checkpoint.tensor("model.norm.weight")
    assert norm.read_quantized((slice(None),)) == "stored as F32"
    checkpoint.close()


@pytest.mark.parametrize("bits", ["keep", "none"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("kinds", "place"),
    [(("Q8_0",), 0), (("Q4_1",), 0), (("Q4_1",), 2), (("Q3_K", "F16"), 108)],
    ids=str,
)
def test_a_scale_or_minimum_that_is_not_finite_is_refused(
    kinds: Sequence[str], place: int, number: float, bits: str, tmp_path: Path
) -> None:
    """`place`: where it is in a block."""
    file = gguf_of(Path(NANO), tmp_path / "m.gguf", kinds)
    damaged = read_header(file).tensors["blk.1.ffn_down.weight"]
    with file.open("r+b") as opened:
        opened.seek(damaged.offset_bytes + 3 * damaged.type.nbytes + place)
        opened.write(np.float16(number).tobytes())
    worker = Worker(load(str(file), {"model.device": "cpu", "model.quantize": bits}))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj.*infinite or not a number"):
        worker.load()


@pytest.mark.parametrize("kinds", [("F16",), ("Q3_K", "F16"), ("Q2_K", "F16")], ids="+".join)
def test_other_types_have_no_integers_for_products(kinds: Sequence[str], tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(gguf_of(Path(NANO), tmp_path / "m.gguf", kinds))
    tensor = checkpoint.tensor("model.layers.0.mlp.down_proj.weight")
    assert tensor.read_quantized((slice(None), slice(None))) == f"stored as {kinds[0]}"
    checkpoint.close()


@pytest.mark.parametrize(
    "options", [{}, {"parallel.tensor": 2}, {"model.backend": "transformers"}], ids=str
)
@pytest.mark.parametrize("kinds", [("Q8_0",), ("Q4_0",), ("Q5_0",), ("Q6_K", "Q8_0")], ids="+".join)
def test_answers_with_kept_integers_are_the_same(
    kinds: Sequence[str], options: dict[str, Any], tmp_path: Path
) -> None:
    """Types without minima have exactly the numbers of the file."""
    file = gguf_of(Path(NANO), tmp_path / "m.gguf", kinds)
    assert greedy(file, **options, **{"model.quantize": "keep"}) == greedy(file, **options)
    loaded = Worker(load(str(file), {"model.dtype": "float32", "model.quantize": "keep"}))
    loaded.load()
    layers = [each for each in loaded.model.modules() if isinstance(each, PackedWeight)]
    assert all(isinstance(each.weight, PackedQuantizedTensor) for each in layers)


def test_kept_integers_sleep_are_replaced_and_have_adapters(tmp_path: Path) -> None:
    """Groups of 16 numbers, and of 32."""
    file = gguf_of(Path(NANO), tmp_path / "m.gguf", ("Q6_K", "Q8_0"))
    shapes = adapters.module_shapes(AutoModelForCausalLM.from_pretrained(NANO))
    adapter = str(adapters.make_adapter(tmp_path / "adapter", shapes, seed=3))
    settings = {"model.device": "cpu", "model.dtype": "float32", "cache.memory_bytes": 4_000_000}
    params = SamplingParams(temperature=0, max_tokens=12)

    def tokens(llm: LLM, **options: Any) -> list[Sequence[int]]:
        return [one.outputs[0].token_ids for one in llm.generate(PROMPTS, params, **options)]

    found = []
    for quantize in ("none", "keep"):
        values = {**settings, "model.quantize": quantize}
        with LLM(str(file), **values, **{"lora.adapters": {"one": adapter}}) as llm:
            plain, adapted = tokens(llm), tokens(llm, adapter="one")
            llm.sleep(1)
            llm.wake_up()
            assert (tokens(llm), tokens(llm, adapter="one")) == (plain, adapted)
        with LLM(str(file), **values) as llm:
            llm.update_weights(str(file))
            assert tokens(llm) == plain
        found.append((plain, adapted))
    assert found[0] == found[1]


def test_a_worker_reads_the_header_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that has changed is read again."""
    file, headers = gguf_of(Path(NANO), tmp_path / "m.gguf", ("Q8_0",)), []

    def read(path: Path) -> Any:
        headers.append(path)
        return read_header(path)

    monkeypatch.setattr("swell.worker.checkpoint.gguf.checkpoint.read_header", read)
    config = load(str(file), {"model.device": "cpu", "model.dtype": "float32"})
    Worker(config).load()
    Worker(config).load()
    assert headers == [file]
    gguf_of(Path(NANO), file, ("Q4_0",))
    Worker(config).load()
    assert headers == [file, file]
