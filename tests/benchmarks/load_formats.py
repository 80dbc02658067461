"""`python -m tests.benchmarks.load_formats`: the cost of a start with each form of the weights.

A random llama of 156 M parameters, saved by transformers and by `swell save-sharded`: as a GPU
reads it, and packed for this CPU. Each start is a process of its own, in turn, so that other load
of the machine affects all; the files are in the page cache. Before that, one row decodes with
mapped weights and with weights in memory, which must be equally fast.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from swell.configs.runtime.process import prepare_for_torch

prepare_for_torch()

ROUNDS, PAIRS, NEW_TOKENS = 5, 15, 8
NANO = Path(__file__).parents[2] / "configs" / "models" / "nano"
DTYPE = "float32"
SHAPE = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
OPTIONS = {"cache.memory_bytes": 100_000_000, "cache.prefix_caching": False}
FORMS = ("auto", "copied", "mapped")


def make(folder: Path) -> None:
    """Writes the model in all forms, each in a folder of its own."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from swell.configs.schema import load
    from swell.worker.sharded.saving import save_sharded

    source = folder / "auto"
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(getattr(torch, DTYPE))
    model.save_pretrained(source)
    for file in NANO.glob("tokenizer*"):
        shutil.copy(file, source)
    for form, device in (("copied", "cuda"), ("mapped", "cpu")):
        save_sharded(load(str(source), {"model.device": device}), folder / form, lambda *_: None)


def memory(name: str) -> int:
    """Returns a memory value of this process in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith(f"{name}:"))


def start(folder: Path) -> dict[str, Any]:
    """Measures one start, in this process."""
    from swell.cluster.local import LLM, SamplingParams
    from swell.worker import worker as worker_module
    from swell.worker.worker import Worker

    spent: dict[str, float] = {}

    def timed(name: str, holder: Any, function: str) -> None:
        real = getattr(holder, function)

        def call(*arguments: Any, **keys: Any) -> Any:
            before = time.perf_counter(), time.process_time()
            result = real(*arguments, **keys)
            spent[f"{name}_s"] = time.perf_counter() - before[0]
            spent[f"{name}_cpu_s"] = time.process_time() - before[1]
            return result

        setattr(holder, function, call)

    timed("load", Worker, "load")
    timed("read", worker_module, "load_weights")
    timed("pack", worker_module, "pack_weights")
    with LLM(str(folder), **OPTIONS) as llm:
        peak, own = memory("VmHWM"), memory("RssAnon")
        answer = llm.generate([[5, 6, 7, 8]], SamplingParams(temperature=0, max_tokens=16))
    result: dict[str, Any] = dict(spent)
    result["weights_s"] = spent["read_s"] + spent["pack_s"]
    result["weights_cpu_s"] = spent["read_cpu_s"] + spent["pack_cpu_s"]
    tokens = list(answer[0].outputs[0].token_ids)
    return result | {"peak_mb": peak, "own_mb": own, "tokens": tokens}


def decode(folder: Path) -> dict[str, float]:
    """Returns the time of one row's tokens with mapped weights over that with weights in memory,
    measured in turn in one process: the median and the quartiles."""
    from swell.cluster.local import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)

    def time_of(llm: LLM) -> float:
        began = time.process_time()
        llm.generate([[5, 6, 7, 8]], params)
        return time.process_time() - began

    with (
        LLM(str(folder / "auto"), **OPTIONS) as auto,
        LLM(str(folder / "mapped"), **OPTIONS) as mapped,
    ):
        ratios = [time_of(mapped) / time_of(auto) for _ in range(PAIRS + 1)][1:]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"low": low, "median": middle, "high": high}


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="swell-formats-"))
    rounds: list[dict[str, dict[str, Any]]] = []
    try:
        make(folder)
        print("decode, mapped over auto, processor time:", decode(folder), flush=True)
        for _ in range(ROUNDS + 1):
            rounds.append({form: in_child(folder / form) for form in FORMS})
            show(rounds[-1:])
    finally:
        shutil.rmtree(folder)
    assert all(one[form]["tokens"] == one["auto"]["tokens"] for one in rounds for form in FORMS)
    print(f"{ROUNDS} rounds:")
    show(rounds[1:])  # the first round brings the files into the page cache


def in_child(folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.benchmarks.load_formats", str(folder)]
    environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=300
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def show(rounds: list[dict[str, dict[str, Any]]]) -> None:
    """Prints medians, and the median and range of each round's ratio to `auto`."""
    keys = [key for key in rounds[0]["auto"] if key != "tokens"]
    for key in sorted(keys):
        cells = []
        for form in FORMS:
            values = [one[form][key] for one in rounds]
            ratios = [one[form][key] / max(1e-9, one["auto"][key]) for one in rounds]
            middle = statistics.median(ratios)
            ends = f"{min(ratios):.2f} .. {max(ratios):.2f}"
            cells.append(f"{form} {statistics.median(values):.3f} ({middle:.2f}, {ends})")
        print(f"{key:14} " + "   ".join(cells), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(start(Path(sys.argv[1]))))
    else:
        main()
