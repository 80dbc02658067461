"""Streams over HTTP, 128 tokens in and 64 out, m15: ours through the whole cluster, and peers.

All use the same client, in a process of its own: that of `swell bench`.
"""

from __future__ import annotations

from typing import TypeVar

from tests.benchmarks import models, servers
from tests.benchmarks.case import PEERS, Case, Measured, Setup
from tests.benchmarks.interleaved import OURS, InterleavedRounds, Numbers, Rounds
from tests.benchmarks.results import Figure
from tests.benchmarks.servers import Client, Target

A = TypeVar("A", bound=Target)

MODEL = "m15"
SIZES = (128, 64)
_WARM_SIZES = (128, 8)
SETTINGS = (
    "cache.prefix_caching=false",
    "model.max_model_len=2048",
    "model.name=m",
    "cluster.stall_timeout_s=3600",  # the server is stopped between its turns
)
REQUESTS = {1: 10, 16: 48, 64: 128}
"""Streams -> requests of a round."""

THROUGHPUT = {
    1: {"vllm": 2.5},
    64: {"vllm": 2.0, "ray-serve-llm": 3.5},
}
"""Streams -> minimum ratio of tokens per second."""
LATENCIES = ("ttft_p50_ms", "ttft_mean_ms", "ttft_p99_ms", "itl_mean_ms", "itl_p99_ms")


def run(setup: Setup) -> Measured:
    model = models.prepare(MODEL, setup.models)
    contenders = [servers.swell(model, setup, *SETTINGS), *servers.peers(model, setup)]
    figures: list[Figure] = []
    with Client(setup.logs) as client, InterleavedRounds(contenders) as turns:
        for streams in REQUESTS:
            figures += _figures(streams, rounds_of(client, turns, streams, setup.repeats))
    return Measured(figures, turns.problems)


def rounds_of(client: Client, turns: InterleavedRounds[A], streams: int, repeats: int) -> Rounds:
    """Returns rounds with this many streams, after some short answers that are not measured."""
    vocab_size = models.SHAPES[MODEL].vocab_size

    def warm(server: Target) -> Numbers:
        return client.load(server, streams, streams, vocab_size, _WARM_SIZES)

    def measure(server: Target) -> Numbers:
        return client.load(server, streams, REQUESTS[streams], vocab_size, SIZES)

    turns.take(1, warm)
    return turns.take(repeats, measure)


def _figures(streams: int, rounds: Rounds) -> list[Figure]:
    plural = "stream" if streams == 1 else "streams"
    figures = []
    for key in ("tokens_per_s", *LATENCIES):
        what = f"{_title(key)}, {streams} {plural}"
        ours = rounds.series(OURS, key)
        peers = [name for name in rounds if name != OURS]
        for name in peers:
            figures.append(
                Figure(
                    what,
                    ours,
                    PEERS[name].title,
                    rounds.series(name, key),
                    at_least=THROUGHPUT.get(streams, {}).get(name) if "per_s" in key else None,
                    at_most=1.0 if (streams, key, name) == (1, "ttft_p50_ms", "vllm") else None,
                )
            )
        if not peers:
            figures.append(Figure(what, ours))
    return figures


def _title(key: str) -> str:
    if key == "tokens_per_s":
        return "output tokens/s"
    kind, part, unit = key.split("_")
    return f"{kind.upper()} {part}, {unit}"


CASES = {"served": Case("m15 over HTTP: 1, 16 and 64 streams", run)}
