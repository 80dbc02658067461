"""`python -m tests.benchmarks.packed_experts_cost`: the time of a step with packed experts and a
packed router, whose rows do not depend on each other, over that with plain ones.

Two engines in this process with the model nano-moe, one thread, processor time of a step with its
share of the prefill. Both run in turn; the median of the ratios of adjacent measurements is
printed.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any
from unittest.mock import patch

from swell.cluster.local import LLM
from swell.worker.layers.moe import MoE
from swell.worker.layers.packed_weight import PackedWeight, Packing
from tests.benchmarks.routed_experts_cost import NANO_MOE
from tests.benchmarks.sampling_cost import PROMPT_TOKENS, STEPS, plain, print_ratio

NUM_EXPERTS = 8
"""The experts of a layer of nano-moe: the router has this many outputs, and all other weights have
more."""


def step_ms(llm: LLM, rows: int, prompt_tokens: int) -> float:
    prompts = [[3 + (row * 7 + i) % 250 for i in range(prompt_tokens)] for row in range(rows)]
    started = time.process_time()
    llm.generate(prompts, plain(temperature=0.0))
    return (time.process_time() - started) / STEPS * 1e3


def unpacked(**overrides: Any) -> LLM:
    """Returns an engine whose experts and routers are stored as in the checkpoint."""
    pack = PackedWeight.pack

    def pack_others(layer: PackedWeight, packing: Packing) -> None:
        if layer.weight.shape[0] > NUM_EXPERTS:
            pack(layer, packing)

    with (
        patch.object(MoE, "pack", lambda _layer, _packing: None),
        patch.object(PackedWeight, "pack", pack_others),
    ):
        return LLM(NANO_MOE, **overrides)


def main() -> None:
    overrides: dict[str, Any] = {
        "model.device": "cpu",
        "model.cpu_threads": 1,
        "cache.prefix_caching": False,
        "cache.memory_bytes": 100_000_000,
    }
    with unpacked(**overrides) as one, LLM(NANO_MOE, **overrides) as other:
        print(
            f"{'rows, tokens of a prompt':36} {'plain, ms a step':>18} {'packed':>9} {'ratio':>6}"
        )
        for rows, prompt_tokens in ((1, 16), (8, 16), (64, PROMPT_TOKENS), (8, 900)):
            for llm in (one, other):
                step_ms(llm, rows, prompt_tokens)
            print_ratio(
                f"{rows} rows, prompts of {prompt_tokens}",
                partial(step_ms, one, rows, prompt_tokens),
                partial(step_ms, other, rows, prompt_tokens),
            )


if __name__ == "__main__":
    main()
