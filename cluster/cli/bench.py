"""`swell bench`: throughput and latencies of a server, or the throughput of a model offline.

Times are measured at the client: TTFT from before the connection until the first chunk with tokens,
ITL between consecutive chunks with tokens, and end-to-end latency until the end of the stream.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

import msgspec

from swell.cluster.api.admin.protocol import ModelList
from swell.cluster.api.tokenize import TokenizeResponse
from swell.cluster.cli.console import print_table
from swell.cluster.cli.http_client import Client, ServerError, read_events
from swell.cluster.text.json_types import JsonObject

_TEXTS = (
    "The quick brown fox jumps over the lazy dog, twice a day.",
    "In 1984 there were 365 days; 7 times 8 is 56, and 3.14 is nearly pi.",
    "def add(left: int, right: int) -> int:\n    return left + right\n",
    "Nothing is as practical as a good theory; zebras vex jolly queens.",
)
"""Texts whose tokens are the ids of the random prompts: all models accept them."""
_FALLBACK_IDS = range(10, 250)
"""Token ids for servers without `/tokenize`: all known vocabularies are larger."""
_WARM_TOKENS = 4


class Sample(msgspec.Struct):
    """The result of one request."""

    error: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    gaps_s: list[float] = []


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _LastEvent(msgspec.Struct):
    """The fields of a stream's last event that are read: every server sends them."""

    usage: _Usage


class Percentiles(msgspec.Struct, frozen=True):
    """Mean and percentiles, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


class Report(msgspec.Struct, frozen=True):
    """The output of `--json`. Latencies are None if nothing was measured."""

    arguments: dict[str, Any]
    ok: int
    failed: int
    first_error: str | None
    duration_s: float
    requests_per_s: float
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None
    e2e_ms: Percentiles | None


def bench(args: argparse.Namespace) -> int:
    """Measures, prints and writes the report. Returns 1 if a request failed."""
    arguments = {k: v for k, v in vars(args).items() if k not in ("api_key", "command")}
    if args.url is not None:
        samples, duration_s = asyncio.run(_load(args))
    else:
        samples, duration_s = _offline(args)
    report = summarize(samples, duration_s, arguments)
    print_report(report)
    if args.json:
        text = msgspec.json.format(msgspec.json.encode(report), indent=2)
        Path(args.json).write_bytes(text + b"\n")
    return 1 if report.failed else 0


# -------------------------------------------------------------------- a server


async def _load(args: argparse.Namespace) -> tuple[list[Sample], float]:
    """Sends all requests, `concurrency` at a time. Returns their samples and the duration in
    seconds."""
    client = Client(args.url, args.api_key)
    model = await _model(client, args.input_tokens + args.output_tokens)
    ids = await _token_ids(client, model)
    prompts = random_prompts(ids, args.input_tokens, args.requests, args.seed)
    warm = await measure(client, _body(model, prompts[0][:_WARM_TOKENS], 1), 1)
    if warm.error:
        raise ServerError(f"the first request failed: {warm.error}")
    waiting = iter([_body(model, prompt, args.output_tokens) for prompt in prompts])
    samples: list[Sample] = []

    async def work() -> None:
        for body in waiting:
            samples.append(await measure(client, body, args.output_tokens))

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(min(args.concurrency, args.requests))))
    return samples, time.perf_counter() - started


async def measure(client: Client, body: bytes, expected_tokens: int) -> Sample:
    """Streams one response. It has failed if the server reports an error or tokens are missing."""
    sample = Sample()
    started = last = time.perf_counter()
    end = b""
    try:
        async with client.open("POST", "/v1/completions", body) as response:
            async for data in read_events(response):
                now = time.perf_counter()
                if b'"choices":[]' in data:
                    end = data
                    continue
                if sample.ttft_s:
                    sample.gaps_s.append(now - last)
                else:
                    sample.ttft_s = now - started
                last = now
        sample.e2e_s = time.perf_counter() - started
        usage = msgspec.json.decode(end, type=_LastEvent).usage
        sample.prompt_tokens, sample.output_tokens = usage.prompt_tokens, usage.completion_tokens
        if sample.output_tokens != expected_tokens:
            sample.error = f"received {sample.output_tokens} tokens, requested {expected_tokens}"
    except ServerError as error:
        sample.error = str(error)
    except msgspec.DecodeError:
        sample.error = "the stream contained no usage"
    return sample


def _body(model: str, prompt: list[int], output_tokens: int) -> bytes:
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


async def _model(client: Client, tokens: int) -> str:
    """Returns the name of the served model. Raises ServerError if a request would not fit."""
    card = (await client.get("/v1/models", ModelList)).data[0]
    if tokens > card.max_model_len:
        raise ServerError(
            f"{tokens} tokens of prompt and answer exceed the {card.max_model_len} that "
            f"{card.id!r} takes; lower --input-tokens or --output-tokens"
        )
    return card.id


async def _token_ids(client: Client, model: str) -> list[int]:
    """Returns token ids of the model, from texts that the server tokenizes."""
    ids: set[int] = set()
    for text in _TEXTS:
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        try:
            ids.update((await client.post("/tokenize", body, TokenizeResponse)).tokens)
        except ServerError as error:
            if error.status not in (404, 405):
                raise
            return list(_FALLBACK_IDS)
    return sorted(ids)


def random_prompts(ids: Sequence[int], tokens: int, count: int, seed: int) -> list[list[int]]:
    """Returns prompts without common prefixes that are worth caching. The same seed gives the same
    prompts."""
    rng = random.Random(seed)
    return [rng.choices(ids, k=tokens) for _ in range(count)]


# -------------------------------------------------------------------- a model in this process


def _offline(args: argparse.Namespace) -> tuple[list[Sample], float]:
    from swell.cluster.cli.generate import quiet_transformers

    quiet_transformers()
    from swell.cluster.local import LLM, SamplingParams

    overrides = {"scheduler.max_rows": args.concurrency, **dict(args.set)}
    params = SamplingParams(temperature=0, max_tokens=args.output_tokens, ignore_eos=True)
    with LLM(args.model, **overrides) as llm:
        warm = llm.generate(list(_TEXTS), SamplingParams(temperature=0, max_tokens=2))
        ids = sorted({token for output in warm for token in output.prompt_token_ids})
        prompts = random_prompts(ids, args.input_tokens, args.requests, args.seed)
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=True)
        duration_s = time.perf_counter() - started
    samples = []
    for output in outputs:
        answer = output.outputs[0]
        sample = Sample(
            prompt_tokens=len(output.prompt_token_ids), output_tokens=answer.num_output_tokens
        )
        if answer.num_output_tokens != args.output_tokens:
            sample.error = f"received {answer.num_output_tokens} tokens: {answer.stop_reason}"
        samples.append(sample)
    return samples, duration_s


# -------------------------------------------------------------------- the report


def summarize(samples: Sequence[Sample], duration_s: float, arguments: JsonObject) -> Report:
    """Summarizes samples. Rates and latencies only count successful requests."""
    good = [sample for sample in samples if sample.error is None]
    errors = [sample.error for sample in samples if sample.error is not None]
    prompt_tokens = sum(sample.prompt_tokens for sample in good)
    output_tokens = sum(sample.output_tokens for sample in good)
    seconds = max(duration_s, 1e-9)
    return Report(
        arguments=arguments,
        ok=len(good),
        failed=len(errors),
        first_error=errors[0] if errors else None,
        duration_s=duration_s,
        requests_per_s=len(good) / seconds,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / seconds,
        total_tokens_per_s=(prompt_tokens + output_tokens) / seconds,
        ttft_ms=percentiles_ms(sample.ttft_s for sample in good if sample.ttft_s),
        itl_ms=percentiles_ms(gap for sample in good for gap in sample.gaps_s),
        e2e_ms=percentiles_ms(sample.e2e_s for sample in good if sample.e2e_s),
    )


def percentiles_ms(seconds: Iterable[float]) -> Percentiles | None:
    """Returns percentiles with linear interpolation, as numpy does by default; None: there are no
    values."""
    values = [1000 * value for value in seconds]
    if not values:
        return None
    cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99
    return Percentiles(fmean(values), cuts[49], cuts[89], cuts[98])


def print_report(report: Report) -> None:
    rows = [
        ("requests", f"{report.ok} ok, {report.failed} failed"),
        ("duration", f"{report.duration_s:.2f} s"),
        ("requests/s", f"{report.requests_per_s:.2f}"),
        ("output tokens/s", f"{report.output_tokens_per_s:.1f}"),
        ("total tokens/s", f"{report.total_tokens_per_s:.1f}"),
    ]
    print_table("throughput", ("", "value"), rows)
    spans = (("TTFT", report.ttft_ms), ("ITL", report.itl_ms), ("end to end", report.e2e_ms))
    latencies = []
    for name, known in spans:
        values = [f"{ms:.2f}" for ms in msgspec.structs.astuple(known)] if known else ["-"] * 4
        latencies.append((name, *values))
    print_table("latency in ms", ("", "mean", "p50", "p90", "p99"), latencies)
    if report.first_error:
        print(f"first failure: {report.first_error}")
