"""`python -m tests.benchmarks.gpu_decode`: one GPU, the shape of Qwen3-0.6B, random weights.

Swell and transformers compute the same work in one process, one after the other: rows of equal
prompts and answers, greedy, in bfloat16. Needs a GPU but not Ray; a GPU only uses
`kernels/reference`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from swell.configs.schema import load
from swell.engine.core import EngineCore
from swell.engine.executor import build_executor
from swell.engine.wire import EngineCoreRequest
from swell.worker.sampler_wire import SamplerParams

MODEL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
}
PROMPT_TOKENS, ANSWER_TOKENS = 128, 64
ROWS = (1, 8, 64)
LONG_PROMPT_TOKENS = 2000
REPEATS = 2


class Swell:
    def __init__(self, folder: Path, depth: int) -> None:
        settings: dict[str, Any] = {
            "model.load_format": "dummy",
            "model.device": "cuda",
            "parallel.executor": "inproc",
            "cache.memory_bytes": 8 << 30,
            "cache.prefix_caching": False,
            "scheduler.max_rows": max(ROWS),
            "scheduler.max_tokens_per_step": max(ROWS) * PROMPT_TOKENS,
            "scheduler.steps_in_flight": depth,
        }
        config = load(str(folder), settings)
        executor = build_executor(config)
        self._core = EngineCore(config, executor, executor.start())

    def generate(self, prompts: list[list[int]], tokens: int) -> None:
        params = SamplerParams()
        for index, prompt in enumerate(prompts):
            request = EngineCoreRequest(str(index), prompt, params, tokens)
            assert self._core.add_request(request, b"client") is None
        while self._core.has_work:
            self._core.step()

    def close(self) -> None:
        self._core.shutdown()


class Transformers:
    def __init__(self, folder: Path) -> None:
        config = transformers.AutoConfig.from_pretrained(folder)
        with torch.device("cuda"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self._model: Any = model.eval()
        self._model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], tokens: int) -> None:
        ids = torch.tensor(prompts, device="cuda")
        self._model.generate(ids, do_sample=False, max_new_tokens=tokens, pad_token_id=0)

    def close(self) -> None:
        del self._model


def prompts_of(rows: int, length: int) -> list[list[int]]:
    return [[3 + (row * 977 + i * 31) % 150000 for i in range(length)] for row in range(rows)]


def seconds(engine: Swell | Transformers, prompts: list[list[int]], tokens: int) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    engine.generate(prompts, tokens)
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def measure(label: str, engine: Swell | Transformers) -> list[str]:
    """Returns the columns of a row of the table."""
    columns = []
    for rows in ROWS:
        prompts = prompts_of(rows, PROMPT_TOKENS)
        engine.generate(prompts, ANSWER_TOKENS)  # allocates buffers
        whole_s = median(seconds(engine, prompts, ANSWER_TOKENS) for _ in range(REPEATS))
        first_s = median(seconds(engine, prompts, 1) for _ in range(REPEATS))
        step_s = (whole_s - first_s) / (ANSWER_TOKENS - 1)
        columns.append(f"{step_s * 1e3:.1f} ms, {rows / step_s:.0f}/s")
        print(label, rows, columns[-1], flush=True)
    long = prompts_of(1, LONG_PROMPT_TOKENS)
    engine.generate(long, 1)
    first_s = median(seconds(engine, long, 1) for _ in range(REPEATS))
    return [*columns, f"{first_s * 1e3:.0f} ms"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", help="a part of the names of those to measure", default="")
    wanted = parser.parse_args().engines
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    heads = [f"{rows} rows: a step, tokens" for rows in ROWS]
    print("|", " | ".join(["engine", *heads, f"{LONG_PROMPT_TOKENS} tokens of prompt"]), "|")
    with tempfile.TemporaryDirectory(prefix="swell-gpu-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(MODEL))
        makers: dict[str, Callable[[], Swell | Transformers]] = {
            "transformers": lambda: Transformers(folder),
            "Swell, 1 step in flight": lambda: Swell(folder, 1),
            "Swell, 2 steps in flight": lambda: Swell(folder, 2),
        }
        for label in [label for label in makers if wanted in label]:
            engine = makers[label]()
            print("|", " | ".join([label, *measure(label, engine)]), "|", flush=True)
            engine.close()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
