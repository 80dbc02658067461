"""`python -m tests.benchmarks.adapters_cost`: the cost of adapters (LoRA) in a step.

One engine in this process, the llama of `sampling_cost`, 64 rows that decode; adapters of all
linear modules. One thread computes, and its processor time is measured, on which other load of the
machine has little effect. Batches with adapters alternate with the same batches without. The median
of the ratios of adjacent measurements is printed.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from swell.cluster.local import LLM
from tests.benchmarks.sampling_cost import (
    MODEL,
    NANO,
    PROMPT_TOKENS,
    ROWS,
    STEPS,
    plain,
    print_ratio,
)
from tests.support.weights import adapters

RANKS = (8, 16)
COUNTS = (1, 8)
"""The number of adapters among the rows of a batch."""


def shapes() -> dict[str, tuple[int, int]]:
    sizes: dict[str, Any] = MODEL
    hidden, wide = sizes["hidden_size"], sizes["intermediate_size"]
    of_leaf = {
        **{f"self_attn.{leaf}": (hidden, hidden) for leaf in adapters.ATTENTION},
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    return {
        f"model.layers.{layer}.{leaf}": shape
        for layer in range(sizes["num_hidden_layers"])
        for leaf, shape in of_leaf.items()
    }


def step_ms(llm: LLM, names: list[str]) -> float:
    """Returns the mean processor time of a step, including the prefill; the names are assigned to
    the rows in turn."""
    prompts = [[3 + (row * 7 + i) % 300 for i in range(PROMPT_TOKENS)] for row in range(ROWS)]
    each = [names[row % len(names)] for row in range(ROWS)]
    started = time.process_time()
    llm.generate(prompts, plain(temperature=0.0), adapter=each)
    return (time.process_time() - started) / STEPS * 1e3


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="swell-costs-"))
    try:
        for file in NANO.glob("tokenizer*"):
            shutil.copy(file, folder)
        (folder / "config.json").write_text(json.dumps(MODEL))
        made = {
            f"r{rank}-{number}": str(
                adapters.make_adapter(
                    folder / f"r{rank}-{number}", shapes(), rank=rank, seed=number
                )
            )
            for rank in RANKS
            for number in range(max(COUNTS))
        }
        overrides: dict[str, Any] = {
            "model.load_format": "dummy",
            "model.dtype": "float32",
            "model.cpu_threads": 1,
            "cache.prefix_caching": False,
            "cache.memory_bytes": 400_000_000,
        }
        on = {"lora.adapters": made, "lora.enabled": True}
        with LLM(str(folder), **overrides) as off, LLM(str(folder), **overrides, **on) as llm:
            for one in (off, llm):
                step_ms(one, [""])
            show(off, llm)
    finally:
        shutil.rmtree(folder)


def show(off: LLM, llm: LLM) -> None:
    """Prints the table; `off` is an engine without `lora`."""
    print(f"{'64 rows':36} {'without, ms a step':>18} {'with, ms':>9} {'ratio':>6}")
    for rank in RANKS:
        for count in COUNTS:
            names = [f"r{rank}-{number}" for number in range(count)]
            what = f"{count} adapter{'s' * (count > 1)} of rank {rank}"
            print_ratio(what, partial(step_ms, llm, [""]), partial(step_ms, llm, names))
    print_ratio("lora on, no row has one", partial(step_ms, off, [""]), partial(step_ms, llm, [""]))
    some = [f"r{RANKS[-1]}-0", *[""] * 7]
    what = f"an eighth of the rows, rank {RANKS[-1]}"
    print_ratio(what, partial(step_ms, llm, [""]), partial(step_ms, llm, some))


if __name__ == "__main__":
    main()
