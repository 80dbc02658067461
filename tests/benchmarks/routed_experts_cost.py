"""`python -m tests.benchmarks.routed_experts_cost`: the cost of recording, and of returning, the
experts that computed each token.

Two engines in this process with the model nano-moe, 64 rows that decode, one thread, processor time
of a step with its share of the prefill. Both run in turn; the median of the ratios of adjacent
measurements is printed.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from swell.cluster.local import LLM
from tests.benchmarks.sampling_cost import NANO, PROMPT_TOKENS, ROWS, STEPS, plain, print_ratio

NANO_MOE = str(NANO.parent / "nano-moe")


def step_ms(llm: LLM, requested: bool = False) -> float:
    prompts = [[3 + (row * 7 + i) % 250 for i in range(PROMPT_TOKENS)] for row in range(ROWS)]
    started = time.process_time()
    llm.generate(prompts, plain(temperature=0.0, return_routed_experts=requested))
    return (time.process_time() - started) / STEPS * 1e3


def main() -> None:
    overrides: dict[str, Any] = {
        "model.device": "cpu",
        "model.cpu_threads": 1,
        "cache.prefix_caching": False,
        "cache.memory_bytes": 100_000_000,
    }
    recording = {"model.routed_experts": True}
    with LLM(NANO_MOE, **overrides) as off, LLM(NANO_MOE, **overrides, **recording) as on:
        for llm in (off, on):
            step_ms(llm)
        print(f"{'64 rows':36} {'off, ms a step':>18} {'on, ms':>9} {'ratio':>6}")
        print_ratio("recorded, no row asks", partial(step_ms, off), partial(step_ms, on))
        print_ratio("every row asks", partial(step_ms, off), partial(step_ms, on, True))


if __name__ == "__main__":
    main()
