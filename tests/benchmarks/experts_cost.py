"""`python -m tests.benchmarks.experts_cost`: the time of a decoding step of models with experts:
transformers' modules with its own experts and with ours, and our classes.

Engines with the same random model in this process, one thread, processor time of a step. They run
in turn; the best step of each is printed.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers

from swell.cluster.local import LLM
from swell.worker.models.generic import causal_lm
from swell.worker.runner import ModelRunner
from swell.worker.wire import SchedulerOutput
from tests.benchmarks.sampling_cost import NANO, plain

ROUNDS, TOKENS, PROMPT_TOKENS, VOCAB = 2, 12, 8, 4096
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "olmoe": {
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_experts": 16,
        "num_experts_per_tok": 4,
    },
}
ENGINES = ("transformers' experts", "our experts", "native")


def make(folder: Path, kind: str) -> None:
    """Saves a random model, with nano's tokenizer."""
    config = transformers.AutoConfig.for_model(kind, **SHAPE, **MODELS[kind])
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
        folder
    )
    for file in NANO.glob("tokenizer*"):
        shutil.copy(file, folder)


def start(engine: str, folder: Path, dtype: str) -> LLM:
    overrides: dict[str, Any] = {
        "model.device": "cpu",
        "model.cpu_threads": 1,
        "model.dtype": dtype,
        "model.max_model_len": 256,
        "model.backend": "auto" if engine == "native" else "transformers",
        "cache.prefix_caching": False,
        "cache.memory_bytes": 50_000_000,
        "scheduler.steps_in_flight": 1,
    }
    with ExitStack() as changes:
        if engine == "transformers' experts":
            changes.enter_context(patch.object(causal_lm, "use_expert_kernels", lambda _: None))
        return LLM(str(folder), **overrides)


@contextmanager
def timed() -> Iterator[list[tuple[SchedulerOutput, float]]]:
    """Yields a list of steps and their processor time in seconds, which grows in this context."""
    steps: list[tuple[SchedulerOutput, float]] = []
    execute = ModelRunner.execute_model

    def execute_timed(self: ModelRunner, plan: SchedulerOutput) -> Any:
        started = time.thread_time()
        output = execute(self, plan)
        steps.append((plan, time.thread_time() - started))
        return output

    with patch.object(ModelRunner, "execute_model", execute_timed):
        yield steps


def decoding_ms(llm: LLM, rows: int) -> float:
    """Returns the time of the best step in which each row computes one token."""
    prompts = [[3 + (r * 37 + i * 11) % 4000 for i in range(PROMPT_TOKENS)] for r in range(rows)]
    with timed() as steps:
        llm.generate(prompts, plain(temperature=0.0, max_tokens=TOKENS))
    return 1e3 * min(s for plan, s in steps if len(plan.slots) == rows == sum(plan.num_tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    dtype = parser.parse_args().dtype
    for kind in MODELS:
        engines = [name for name in ENGINES if name != "native" or kind == "mixtral"]
        with tempfile.TemporaryDirectory() as name, ExitStack() as running:
            make(Path(name), kind)
            llms = [running.enter_context(start(each, Path(name), dtype)) for each in engines]
            for rows in (1, 8, 32):
                rounds = [[decoding_ms(llm, rows) for llm in llms] for _ in range(ROUNDS)]
                best = [min(of_engine) for of_engine in zip(*rounds, strict=True)]
                columns = ", ".join(
                    f"{each} {ms:.2f} ms ({best[0] / ms:.2f})"
                    for each, ms in zip(engines, best, strict=True)
                )
                print(f"{kind} {dtype}, {rows} rows: {columns}", flush=True)


if __name__ == "__main__":
    main()
