"""The largest steps fit into the memory that the KV cache leaves, and little of the card is unused.
In one step all rows are prompts, in others all rows but one decode while a long prompt is computed.
All rows have the parameters and outputs that need the most memory."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from swell.worker.sampler_wire import SamplerParams
from tests.gpu_report.engines import Swell, prompts_of, write_config
from tests.gpu_report.scale import SHAPES, Figures, Scale

MOST_UNUSED = 0.03
"""The part of the card that may be free after the largest steps."""


def run(scale: Scale) -> Figures:
    shape = SHAPES[scale.pick("0.6B", "tiny")]
    rows, chunk, tokens = scale.pick((256, 8192, 8), (4, 32, 4))
    with (
        tempfile.TemporaryDirectory(prefix="swell-gpu-") as name,
        Swell(
            write_config(Path(name), shape),
            scale,
            model__load_format="dummy",
            model__max_model_len=2 * chunk,
            scheduler__max_rows=rows,
            scheduler__max_tokens_per_step=chunk,
            cache__memory_bytes=scale.pick(None, 8 << 20),
        ) as engine,
    ):
        steps: set[tuple[int, int]] = set()
        _record(engine, steps)
        params = _most_memory(shape.vocab)
        full = prompts_of(rows, chunk // rows, shape.vocab)
        long = prompts_of(1, 2 * chunk - tokens, shape.vocab)
        for prompts in (full, [*full[1:], *long]):
            outputs = engine.outputs(prompts, tokens, params)
            counts = [sum(len(one.new_token_ids) for one in each) for each in outputs]
            assert counts == [tokens] * rows, counts
        assert (rows, chunk) in steps, f"no step was the largest: {sorted(steps)}"
        figures: Figures = {"blocks": engine.core.limits.num_blocks}
        if scale.is_full:
            torch.cuda.synchronize()
            stats = torch.cuda.memory_stats()
            figures |= check_card(*torch.cuda.mem_get_info(), stats["num_ooms"])
            figures["retries of allocations"] = stats["num_alloc_retries"]
    return figures


def _most_memory(vocab: int) -> SamplerParams:
    """Returns the parameters of a request that needs the most memory in a step."""
    return SamplerParams(
        temperature=1.0,
        top_k=20,
        top_p=0.9,
        min_p=0.01,
        seed=7,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        logit_bias={5: 1.0},
        bad_words=[[5, 6]],
        allowed_token_ids=list(range(min(1024, vocab))),
        logprobs=20,
        prompt_logprobs=20,
    )


def _record(engine: Swell, steps: set[tuple[int, int]]) -> None:
    """Adds the rows and the tokens of each step."""
    execute = engine.core.executor.execute

    def recorded(plan: object) -> object:
        counts = plan.num_tokens  # type: ignore[attr-defined]
        steps.add((len(counts), sum(counts)))
        return execute(plan)  # type: ignore[arg-type]

    engine.core.executor.execute = recorded  # type: ignore[method-assign,assignment]


def check_card(free: int, total: int, refused: int) -> Figures:
    """Returns the part of a card that is unused after the largest steps. Asserts that it is small,
    and that torch was never refused memory."""
    assert not refused, f"torch was refused memory {refused} times"
    share = free / total
    assert share <= MOST_UNUSED, f"{share:.1%} of the card is unused"
    return {"share unused": round(share, 4)}
