"""`python -m tests.benchmarks.sampling_cost`: the cost of each sampling parameter in a step, and of
a step without any.

One engine in this process, a random llama of 12.9 M parameters (vocabulary 32 000), 64 rows that
decode. Each parameter alternates with plain answers, so that other load of the machine affects
both; the median of the ratios of adjacent measurements is printed.
"""

from __future__ import annotations

import gc
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from swell.cluster.local import LLM, SamplingParams
from swell.cluster.text.params.sampling_params import StructuredOutputs
from swell.worker.sample.logits_processor import LogitsProcessor
from swell.worker.sample.sampler import Sampler

ROWS, PROMPT_TOKENS, STEPS, PAIRS = 64, 32, 48, 3
NANO = Path(__file__).parents[2] / "configs" / "models" / "nano"
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 400}

PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "logit_bias (300 tokens)": {"logit_bias": dict.fromkeys(range(1000, 1300), -5.0)},
    "bad_words (50)": {"bad_words": [f"word{i}" for i in range(50)]},
    "allowed_token_ids (1000)": {"allowed_token_ids": list(range(1000))},
    "min_tokens": {"min_tokens": STEPS, "ignore_eos": False},
    "logprobs (0)": {"logprobs": 0},
    "logprobs (5)": {"logprobs": 5},
    "json_schema (vocabulary of 320)": {"structured_outputs": StructuredOutputs(json=SCHEMA)},
}


def plain(**fields: Any) -> SamplingParams:
    defaults = {"temperature": 0.8, "seed": 1, "max_tokens": STEPS, "ignore_eos": True}
    return SamplingParams(**{**defaults, **fields})


def step_ms(llm: LLM, params: SamplingParams) -> float:
    """Returns the mean time of a step, including the prefill."""
    prompts = [[3 + (row * 7 + i) % 300 for i in range(PROMPT_TOKENS)] for row in range(ROWS)]
    started = time.perf_counter()
    llm.generate(prompts, params)
    return (time.perf_counter() - started) / STEPS * 1e3


def compare(one: Callable[[], float], other: Callable[[], float]) -> tuple[float, float, float]:
    """Returns the medians of both, and of the ratios of adjacent measurements, `other` over
    `one`."""
    pairs = [(one(), other()) for _ in range(PAIRS)]
    return (
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(b / a for a, b in pairs),
    )


class Timed:
    """Wraps a logits processor and measures its time."""

    def __init__(self, stage: LogitsProcessor) -> None:
        self._stage = stage
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            started = time.perf_counter()
            result = getattr(self._stage, name)(*args)
            self.seconds += time.perf_counter() - started
            return result

        return call


def unused(llm: LLM) -> None:
    """Prints the time of the logits processors in a step that needs none of them."""
    (sampler,) = (thing for thing in gc.get_objects() if isinstance(thing, Sampler))
    stages = sampler._logits_processors
    timed = [Timed(stage) for stage in stages]
    sampler._logits_processors = timed  # type: ignore[assignment]
    step = step_ms(llm, plain())
    sampler._logits_processors = stages
    taken = sum(stage.seconds for stage in timed) / STEPS * 1e3
    print(f"logits processors without use: {taken:.3f} of {step:.2f} ms a step, {taken / step:.2%}")


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="swell-costs-"))
    try:
        for file in NANO.glob("tokenizer*"):
            shutil.copy(file, folder)
        (folder / "config.json").write_text(json.dumps(MODEL))
        overrides = {
            "model.load_format": "dummy",
            "model.dtype": "float32",
            "cache.prefix_caching": False,
            "cache.memory_bytes": 400_000_000,
        }
        with LLM(str(folder), **overrides) as llm:
            step_ms(llm, plain())
            show(llm)
    finally:
        shutil.rmtree(folder)


def show(llm: LLM) -> None:
    unused(llm)
    print(f"{'64 rows':36} {'without, ms a step':>18} {'with, ms':>9} {'ratio':>6}")
    for name, fields in PARAMETERS.items():
        params = plain(**fields)
        step_ms(llm, params)  # tables are built at first use
        print_ratio(name, partial(step_ms, llm, plain()), partial(step_ms, llm, params))


def print_ratio(name: str, one: Callable[[], float], other: Callable[[], float]) -> None:
    base, used, ratio = compare(one, other)
    print(f"{name:36} {base:18.2f} {used:9.2f} {ratio:6.3f}", flush=True)


if __name__ == "__main__":
    main()
