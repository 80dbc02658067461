"""`python -m tests.benchmarks.quality MODEL [FILE ...] [--set KEY=VALUE,KEY=VALUE ...]`: what
rounded weights and a rounded cache cost in quality.

Each `--set` is one engine. With text files: the perplexity of their tokens. The tokens are
cut into windows, and each window begins with the token that the tokenizer puts before a text.
Without files: the held-out tasks of the model (`heldout.jsonl`), how many are answered right, and
the perplexity of the right answers.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swell.cluster.local import LLM, SamplingParams

MEMORY = {"cache.memory_bytes": 400_000_000, "cache.prefix_caching": False}


def loss(llm: LLM, prompts: Sequence[list[int]], first: Sequence[int]) -> float:
    """Returns the mean negative log probability, in nats, of the tokens of each prompt from the
    index in `first` on."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    total, count = 0.0, 0
    outputs = llm.generate(list(prompts), params)
    for output, prompt, begin in zip(outputs, prompts, first, strict=True):
        table = output.prompt_logprobs
        assert table is not None
        for token, known in zip(prompt[begin:], table[begin:], strict=True):
            assert known is not None
            total -= known[token].logprob
            count += 1
    return total / count


def text_windows(llm: LLM, files: Sequence[Path], size: int) -> list[list[int]]:
    """Returns the tokens of all files in windows of at most `size` tokens."""
    tokenizer = llm.get_tokenizer()
    start = tokenizer.encode("")
    windows = []
    for file in files:
        ids = tokenizer.encode(file.read_text(), add_special_tokens=False)
        step = size - len(start)
        windows += [start + ids[i : i + step] for i in range(0, len(ids), step)]
    return [window for window in windows if len(window) > len(start) + 1]


def held_out(llm: LLM, file: Path) -> dict[str, Any]:
    tasks = [json.loads(line) for line in file.read_text().splitlines()]
    tokenizer = llm.get_tokenizer()
    prompts = [
        tokenizer.apply_chat_template(
            task["messages"], tokenize=True, add_generation_prompt=True, return_dict=False
        )
        for task in tasks
    ]
    end = [tokenizer.eos_token_id]
    answers = [tokenizer.encode(task["answer"], add_special_tokens=False) + end for task in tasks]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=200))
    texts = [output.outputs[0].text for output in outputs]
    right = sum(text == task["answer"] for text, task in zip(texts, tasks, strict=True))
    whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    value = loss(llm, whole, [len(prompt) for prompt in prompts])
    return {"right": right, "of": len(tasks), "perplexity": round(math.exp(value), 5)}


def quality_of_texts(llm: LLM, files: Sequence[Path], size: int) -> dict[str, Any]:
    windows = text_windows(llm, files, size)
    begin = len(llm.get_tokenizer().encode("")) or 1
    value = loss(llm, windows, [begin] * len(windows))
    tokens = sum(len(window) - begin for window in windows)
    return {"tokens": tokens, "perplexity": round(math.exp(value), 4)}


def settings_of(text: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in text.split(",") if part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--set", action="append", dest="settings", metavar="KEY=VALUE,...")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window")
    args = parser.parse_args()
    for text in args.settings or [""]:
        with LLM(args.model, **MEMORY, **settings_of(text)) as llm:
            if args.files:
                result = quality_of_texts(llm, args.files, args.window)
            else:
                result = held_out(llm, Path(args.model) / "heldout.jsonl")
        print(json.dumps({"settings": text or "default", **result}), flush=True)


if __name__ == "__main__":
    main()
