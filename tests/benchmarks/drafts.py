"""`python -m tests.benchmarks.drafts`: output tokens a second with drafts by n-grams over those
without.

Two engines of this process with the model nano, greedy, answer the same prompts in turn, so that
other load of the machine affects both. The median of the ratios of adjacent measurements is
printed. The answers must be equal. `repetitive`: each row repeats a word of its own eight times;
`mixed`: short answers of all tasks of the model.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import time
from pathlib import Path
from statistics import median

from swell.cluster.local import LLM, SamplingParams

NANO = Path(__file__).parents[2] / "configs" / "models" / "nano"
CASES = (("repetitive", 1), ("repetitive", 8), ("repetitive", 64), *(("mixed", n) for n in (1, 8)))
"""The kinds of prompts, and the number of prompts in a batch."""
BATCHES = 12
"""The number of batches, answered one after the other, in each measurement of few rows."""

Chats = list[list[dict[str, str]]]


def chats(kind: str, count: int) -> Chats:
    """Returns `count` chats of one turn."""
    if kind == "mixed":
        lines = (NANO / "heldout.jsonl").read_text().splitlines()
        texts = [json.loads(line)["messages"][0]["content"] for line in lines]
        texts = random.Random(0).sample(texts, count)
    else:
        words = random.Random(0)
        texts = [
            f"repeat 8 times: {''.join(words.choices(string.ascii_lowercase, k=8))}"
            for _ in range(count)
        ]
    return [[{"role": "user", "content": text}] for text in texts]


def answer(llm: LLM, batches: list[Chats]) -> tuple[float, list[list[int]]]:
    """Returns output tokens a second, and the tokens of each answer."""
    params = SamplingParams(temperature=0, max_tokens=128)
    started = time.perf_counter()
    done = [output for batch in batches for output in llm.chat(batch, params)]
    seconds = time.perf_counter() - started
    tokens = [output.outputs[0].token_ids for output in done]
    return sum(map(len, tokens)) / seconds, tokens


def compare(plain: LLM, drafting: LLM, kind: str, rows: int, pairs: int) -> str:
    count = rows * (BATCHES if rows < 64 else 2)
    every = chats(kind, count)
    batches = [every[at : at + rows] for at in range(0, count, rows)]
    drafter = drafting._engine.core.scheduler.drafter
    before = drafter.num_drafts, drafter.num_accepted
    without, with_drafts = [], []
    for index in range(pairs + 1):
        one, wanted = answer(plain, batches)
        other, got = answer(drafting, batches)
        assert got == wanted, "drafts have changed an answer"
        if index:  # the first pair is a warm-up
            without.append(one)
            with_drafts.append(other)
    drafts = drafter.num_drafts - before[0]
    accepted = drafter.num_accepted - before[1]
    ratios = sorted(b / a for a, b in zip(without, with_drafts, strict=True))
    share = f"{accepted / drafts:.0%}" if drafts else "-"
    return (
        f"| {kind} | {rows} | {median(without):.0f} | {median(with_drafts):.0f} "
        f"| {median(ratios):.2f} ({ratios[0]:.2f} .. {ratios[-1]:.2f}) | {share} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--model", default=str(NANO))
    args = parser.parse_args()
    print("| answers | rows | without, tokens/s | with | ratio | accepted |")
    print("|---|---:|---:|---:|---:|---:|")
    with LLM(args.model) as plain, LLM(args.model, **{"drafts.method": "ngram"}) as drafting:
        for kind, rows in CASES:
            print(compare(plain, drafting, kind, rows, args.pairs), flush=True)


if __name__ == "__main__":
    main()
