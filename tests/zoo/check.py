"""One model through a whole engine: equal to eager transformers, or refused at load.

The engine's prompts are longer than windows and chunks, several rows share a step, and rows decode
while others are still in their prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from swell.cluster.local import LLM, SamplingParams

PROMPT_TOKENS = (45, 1, 21, 9, 30)
NEW_TOKENS = 6
MAX_MODEL_LEN = 64
TOLERANCE = 1e-4
"""The tolerance of log probabilities in nats; multiplied by the standard deviation of the logits if
that is above 1."""
ENGINE: dict[str, Any] = {
    "model.dtype": "float32",
    "model.device": "cpu",
    "model.cpu_threads": 1,
    "model.max_model_len": MAX_MODEL_LEN,
    "cache.block_tokens": 4,
    "scheduler.max_tokens_per_step": 24,
    "scheduler.max_chunk_tokens": 7,
    "scheduler.max_rows": 4,
}


class RefusedError(Exception):
    """The engine refused the model at load; its message is the reason."""


@dataclass(frozen=True)
class Difference:
    """The difference between the engine's answers and the oracle's."""

    worst: float
    """The largest difference of two log probabilities, as a fraction of the tolerance."""
    where: str
    distinct: int
    """The number of distinct tokens among all of the oracle's most likely ones."""

    @property
    def equal(self) -> bool:
        return self.worst <= 1.0


def prompts_of(vocab: int, pad: int | None) -> list[list[int]]:
    """Returns prompts of random ids of the vocabulary; the last one has the padding token in its
    middle."""
    generator = torch.Generator().manual_seed(1)
    low = min(3, vocab - 1)
    prompts = [torch.randint(low, vocab, (n,), generator=generator).tolist() for n in PROMPT_TOKENS]
    if pad is not None and 0 <= pad < vocab:
        prompts[-1][len(prompts[-1]) // 2] = pad
    return prompts


def answers(folder: Path, vocab: int, pad: int | None, **overrides: Any) -> list[Any]:
    """Returns the answers of a new engine to the prompts. Raises `RefusedError` for a refusal at
    load."""
    try:
        llm = LLM(str(folder), **{**ENGINE, **overrides})
    except ValueError as error:
        raise RefusedError(str(error)) from error
    with llm:
        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=NEW_TOKENS,
                ignore_eos=True,
                logprobs=0,
                prompt_logprobs=0 if i % 2 else None,
            )
            for i in range(len(PROMPT_TOKENS))
        ]
        found = llm.generate(prompts_of(vocab, pad), params)
        llm.check_idle()
    return found


def compare(oracle: Any, found: Sequence[Any]) -> Difference:
    """Compares the answers with the oracle's log probabilities of the same sequences."""
    worst, where, seen = 0.0, "nothing", set()
    for row, answer in enumerate(found):
        prompt, output = answer.prompt_token_ids, answer.outputs[0]
        ids = [*prompt, *output.token_ids]
        with torch.no_grad():
            logits = oracle(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
        table = logits.log_softmax(-1)
        possible = logits[logits > torch.finfo(logits.dtype).min]  # some models mask other tokens
        spread = TOLERANCE * max(1.0, float(possible.std()))
        seen |= set(table.argmax(-1).tolist())
        known: list[tuple[int, float]] = []
        if answer.prompt_logprobs is not None:
            known += [(i, answer.prompt_logprobs.logprobs[i][0]) for i in range(1, len(prompt))]
        start = len(prompt)
        known += [(start + i, output.logprobs.logprobs[i][0]) for i in range(len(output.token_ids))]
        for place, got in known:
            off = abs(got - float(table[place - 1, ids[place]])) / spread
            if not off <= worst:
                worst, where = off, f"row {row}, position {place}"
        for place in range(start, len(ids)):
            off = float(table[place - 1].max() - table[place - 1, ids[place]]) / spread
            if not off <= worst:
                worst, where = off, f"row {row}, the token at {place}"
    return Difference(worst, where, len(seen))
