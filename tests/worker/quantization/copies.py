"""A small quantized model and its dequantized copy, and what an engine answers with each."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from swell.cluster.local import LLM, SamplingParams
from tests.support.device import on_device
from tests.worker import tiny_models
from tests.worker.quantization import writers

NANO = Path(__file__).parents[3] / "configs" / "models" / "nano"
PROMPTS = ["sort: 3 1 2", "copy: abc", "upper: xyz"]
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=3)
PROJECTIONS = ("_proj.weight", "w1.weight", "w2.weight", "w3.weight")


def is_projection(name: str, tensor: Tensor) -> bool:
    return name.endswith(PROJECTIONS) and tensor.dim() == 2


def copies(
    folder: Path,
    form: writers.Format,
    family: str = "llama",
    quantized: Callable[[str, Tensor], bool] = is_projection,
    **sizes: Any,
) -> tuple[Path, Path]:
    """Returns a quantized model and its dequantized copy, in new folders of `folder`."""
    source = folder / "source"
    if "layer_types" not in tiny_models.FAMILIES[family][1]:
        sizes["num_hidden_layers"] = 2
    tiny_models.make(source, family, vocab_size=512, **sizes)
    for file in NANO.glob("tokenizer*"):
        shutil.copy(file, source)
    out = folder / "quantized", folder / "plain"
    writers.quantize_folder(source, form, quantized, out)
    return out


def answers(folder: Path, **settings: Any) -> list[Any]:
    """Returns the tokens and log probabilities of an engine."""
    values = {"cache.memory_bytes": 2_000_000, "model.dtype": "float32", **settings}
    with LLM(str(folder), **on_device(values)) as llm:
        return answers_of(llm)


def answers_of(llm: LLM, rows: Sequence[int] = range(len(PROMPTS))) -> list[Any]:
    prompts = [PROMPTS[row] for row in rows]
    outputs = [one.outputs[0] for one in llm.generate(prompts, GREEDY)]
    return [(list(one.token_ids), one.logprobs) for one in outputs]
