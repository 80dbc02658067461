"""`model.quantize` reaches the kernels for GPUs: answers are those of the dequantized weights, have
the same bits in every batch, and steps are captured."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from swell.cluster.local import LLM, SamplingParams
from swell.kernels import backends
from swell.kernels.triton import float8, linear, quantized
from swell.worker.layers import packed_weight
from swell.worker.step import buckets
from tests.kernels.triton.test_float8 import rounded
from tests.worker import test_model_quantize
from tests.worker.fixed_graphs import FixedGraphs, fixed_graphs
from tests.worker.quantization import writers
from tests.worker.quantization.copies import copies

__all__ = ["fixed_graphs"]
pytestmark = pytest.mark.slow

PROMPT = [7, 11, 3, 9, 30, 12, 25]
OTHERS = [[5, 6, 8], [20], [9, 4, 17, 2, 6]]
PARAMS = SamplingParams(max_tokens=3, temperature=0, logprobs=1, ignore_eos=True)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
BITS = {"int8": 8, "int4": 4}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Lets the kernels for GPUs compute the products of CPU tensors; counts those with quantized
    weights."""
    found: Counter[str] = Counter()
    for name in ("multiply", "rows"):
        call = getattr(quantized, name)

        def counted(*args: Any, name: str = name, call: Any = call) -> Any:
            found[name] += 1
            return call(*args)

        monkeypatch.setattr(quantized, name, counted)
    get = backends.get
    monkeypatch.setattr(
        backends, "get", lambda name, device: linear if name == "linear" else get(name, device)
    )
    return found


def engine(folder: Path, **settings: Any) -> LLM:
    given = {"model.device": "cpu", "cache.memory_bytes": 1 << 20, "scheduler.max_rows": 4}
    return LLM(str(folder), **{"model.dtype": "float32", **given, **settings})


def answers_of(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    found = [output.outputs[0] for output in llm.generate(prompts, PARAMS)]
    return [[one.token_ids, one.logprobs.logprobs] for one in found]


def answers(folder: Path, prompts: list[list[int]], **settings: Any) -> list[Any]:
    with engine(folder, **settings) as llm:
        return answers_of(llm, prompts)


def assert_near(found: list[Any], wanted: list[Any]) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    for (_, some), (_, others) in zip(found, wanted, strict=True):
        assert all(a == pytest.approx(b, abs=1e-4) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize(("kind", "form"), [("llama", "int8"), ("llama-tied", "int4")])
def test_answers_equal_the_dequantized_weights(
    kind: str, form: str, calls: Counter[str], tmp_path: Path
) -> None:
    folder = test_model_quantize.make(tmp_path / "floats", kind, **SIZES)
    twin = test_model_quantize.twin(folder, tmp_path / "twin", BITS[form])
    prompts, settings = [OTHERS[0], PROMPT, OTHERS[1]], {"model.quantize": form}
    expected = answers(twin, prompts, **{"model.exact": True})
    assert not calls
    found = answers(folder, prompts, **settings)
    assert_near(found, expected)
    # Three steps: q, k and v in one product, `o`, gate and up, `down`, and the head.
    assert calls["multiply"] >= 3 * 5 and bool(calls["rows"]) == (kind == "llama-tied")
    alone = answers(folder, [PROMPT], **settings, **{"scheduler.max_tokens_per_step": 4})
    assert alone == [found[1]], "the same bits in every batch"


INTEGERS = ["awq", "gptq-8", "ct-w4a16-channel"]
"""With minima and float32 scales, of 8 bits, and with groups that are cut into several."""
FLOATS = ["fp8-tensor", "fp8-block", "fp8-block-e8m0", "ct-fp8-channel", "ct-mxfp4", "ct-nvfp4"]


@pytest.mark.parametrize("name", INTEGERS + FLOATS)
def test_the_numbers_of_checkpoints(name: str, calls: Counter[str], tmp_path: Path) -> None:
    kept, plain = copies(
        tmp_path, writers.FORMATS[name], **{**SIZES, "hidden_size": 128, "intermediate_size": 256}
    )
    expected = answers(plain, [PROMPT], **{"model.exact": True})
    assert not calls
    assert_near(answers(kept, [PROMPT], **{"model.quantize": "keep"}), expected)
    assert calls["multiply"] >= 3 * 4


@pytest.mark.parametrize("name", ["fp8-tensor", "ct-fp8-channel"])
def test_rounded_activations(
    name: str, calls: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products of layers are those of FP8 by FP8, as on a GPU."""
    kept, _ = copies(
        tmp_path, writers.FORMATS[name], **{**SIZES, "hidden_size": 128, "intermediate_size": 256}
    )
    monkeypatch.setattr(packed_weight, "_why_not_fp8", lambda *_: None)
    found_rows = []

    def defined(
        x: torch.Tensor, weight: float8.RowScaledTensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        found_rows.append(len(x))
        plain = weight.unpack().dequantize(torch.float32).double()
        y = rounded(x) @ plain.T
        return (y if bias is None else y + bias.double()).to(x.dtype)

    settings = {"model.dtype": "bfloat16", "model.quantize": "keep", "model.activations": "fp8"}
    [[tokens, found]] = answers(kept, [PROMPT], **settings)
    assert not calls
    monkeypatch.setattr(float8, "multiply", defined)
    [[wanted_tokens, wanted]] = answers(kept, [PROMPT], **settings)
    assert tokens == wanted_tokens and len(found_rows) >= 3 * 4
    assert all(a == pytest.approx(b, abs=0.02) for a, b in zip(found, wanted, strict=True))


def test_steps_are_captured_and_weights_are_replaced(
    calls: Counter[str],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buckets, "_ROWS", (4,))
    monkeypatch.setattr(buckets, "_TOKENS", (8,))
    folders = [tmp_path / "old", tmp_path / "new"]
    old, new = (
        test_model_quantize.make(folder, "llama", seed=seed, **SIZES)
        for seed, folder in enumerate(folders)
    )
    settings = {"model.quantize": "int4"}
    expected = [answers(each, [PROMPT], **settings) for each in (old, new)]
    graphs: FixedGraphs = request.getfixturevalue("fixed_graphs")
    with engine(old, **settings) as llm:
        assert answers_of(llm, [PROMPT]) == expected[0]
        replays = sum(map(len, graphs.replays.values()))
        assert replays >= 2
        llm.update_weights(str(new))
        assert answers_of(llm, [PROMPT]) == expected[1]
        llm.sleep(2)
        llm.wake_up()
        assert answers_of(llm, [PROMPT]) == expected[1]
        assert sum(map(len, graphs.replays.values())) >= 3 * replays
