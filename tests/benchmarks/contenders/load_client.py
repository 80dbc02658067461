"""Load on a server, by the client of `swell bench`: a round of requests for each line."""

import asyncio
import dataclasses
import json
import time

from lines import Lines


@dataclasses.dataclass
class Load:
    """`requests` requests of random token ids, `streams` at a time."""

    url: str
    streams: int
    requests: int
    inputs: int
    outputs: int
    vocab_size: int
    seed: int


def body(prompt, outputs):
    fields = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": outputs,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(fields).encode()


async def run(load):
    """Returns the samples of all requests and the seconds that they took."""
    from swell.cluster.cli import bench
    from swell.cluster.cli.http_client import Client

    client = Client(load.url)
    ids = range(load.vocab_size // 2, load.vocab_size)
    prompts = bench.random_prompts(ids, load.inputs, load.requests, load.seed)
    waiting = iter([body(prompt, load.outputs) for prompt in prompts])
    samples = []

    async def stream():
        for one in waiting:
            samples.append(await bench.measure(client, one, load.outputs))

    started = time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(load.streams)))
    return samples, time.perf_counter() - started


def numbers(samples, seconds):
    """Returns rates and latencies as a flat dict; `error` if a request failed."""
    from swell.cluster.cli.bench import summarize

    report = summarize(samples, seconds, {})
    if report.failed:
        return {"error": report.first_error}
    made = {"tokens_per_s": report.output_tokens_per_s, "tokens": report.output_tokens}
    for name, spread in (("ttft", report.ttft_ms), ("itl", report.itl_ms)):
        made |= {f"{name}_{part}_ms": getattr(spread, part) for part in ("mean", "p50", "p99")}
    return made


def main(lines):
    lines.send(ready=True)
    for call in lines:
        lines.send(**numbers(*asyncio.run(run(Load(**call)))))


if __name__ == "__main__":
    main(Lines())
