"""`swell serve` and `swell generate`: what loads a model."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from swell.configs.schema import load


def serve(args: argparse.Namespace) -> int:
    overrides = dict(args.set)
    if args.host is not None:
        overrides["serve.host"] = args.host
    if args.port is not None:
        overrides["serve.port"] = args.port
    config = load(args.config, overrides)

    from swell.cluster.cli.launch import serve_forever

    serve_forever(config, args.address)
    return 0


def generate(args: argparse.Namespace) -> int:
    quiet_transformers()
    from swell.cluster.local import LLM, SamplingParams

    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed
    )
    with LLM(args.config, **dict(args.set)) as llm:
        if args.chat:
            talks: list[Any] = [[{"role": "user", "content": text}] for text in args.prompt]
            answers = llm.chat(talks, params)
        else:
            answers = llm.generate(args.prompt, params)
    for prompt, answer in zip(args.prompt, answers, strict=True):
        part = answer.outputs[0]
        if part.finish_reason == "error":
            print(f"swell: {prompt!r}: {part.stop_reason}", file=sys.stderr)
            return 1
        if len(answers) > 1:
            print(f"> {prompt}")
        print(part.text)
    return 0


def quiet_transformers() -> None:
    """Its advice is for those who train; failures are raised all the same."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
