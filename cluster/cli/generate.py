"""`swell generate`: completes prompts in this process, without Ray."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any


def generate(args: argparse.Namespace) -> int:
    quiet_transformers()
    from swell.cluster.local import LLM, SamplingParams

    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed
    )
    with LLM(args.config, **dict(args.set)) as llm:
        if args.chat:
            conversations: list[Any] = [[{"role": "user", "content": text}] for text in args.prompt]
            answers = llm.chat(conversations, params)
        else:
            answers = llm.generate(args.prompt, params)
    for prompt, answer in zip(args.prompt, answers, strict=True):
        output = answer.outputs[0]
        if output.finish_reason in ("error", "invalid"):
            print(f"swell: {prompt!r}: {output.stop_reason}", file=sys.stderr)
            return 1
        if len(answers) > 1:
            print(f"> {prompt}")
        print(output.text)
    return 0


def quiet_transformers() -> None:
    """Hides the warnings of `transformers`, which are about training; errors are still raised."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
