"""The cost of the cluster: the whole path against the same engine and routes in one process.

The processor time of a token is the sum over all processes of the cluster. The model (`dot`)
computes almost nothing, so that its share can be subtracted without much error.

If a step's threads use all cores of a machine, they also lose the time that Ray uses there while
idle. So the bare engine is also measured with the idle cluster running next to it.
"""

from __future__ import annotations

from tests.benchmarks import models, servers
from tests.benchmarks.case import Case, Measured, Setup
from tests.benchmarks.interleaved import OURS, InterleavedRounds, Numbers, Rounds
from tests.benchmarks.results import Figure
from tests.benchmarks.served import MODEL, SETTINGS, SIZES, rounds_of
from tests.benchmarks.servers import Client, CoRunningServers, Server, Target
from tests.benchmarks.worker import Worker

_TOKEN_STREAMS, _TOKEN_REQUESTS = 64, 256


def throughput(setup: Setup) -> Measured:
    """Measures the whole path against the bare engine, with and without the idle cluster next to
    it, at 1 and at 64 streams."""
    model = models.prepare(MODEL, setup.models)
    whole, bare = (make(model, setup, *SETTINGS) for make in (servers.swell, servers.bare))
    beside = CoRunningServers(bare, whole)
    figures: list[Figure] = []
    with (
        Client(setup.logs) as client,
        InterleavedRounds[Target]([whole, bare, beside]) as turns,
    ):
        for streams, bounds in ((1, (0.97, 3.0)), (64, (0.97, None))):
            rounds = rounds_of(client, turns, streams, setup.repeats)
            figures += _compare(streams, rounds, bare.name, bounds)
            figures.append(_rates(streams, rounds, beside.name))
    return Measured(figures, turns.problems)


def _compare(
    streams: int, rounds: Rounds, bare: str, bounds: tuple[float | None, float | None]
) -> list[Figure]:
    first = [rounds.series(name, "ttft_p50_ms") for name in (OURS, bare)]
    more = [our - their for our, their in zip(*first, strict=True)]
    return [
        _rates(streams, rounds, bare, at_least=bounds[0]),
        Figure(f"TTFT p50 beyond bare, ms, {_at(streams)}", more, at_most=bounds[1]),
    ]


def _rates(streams: int, rounds: Rounds, against: str, at_least: float | None = None) -> Figure:
    ours, theirs = (rounds.series(name, "tokens_per_s") for name in (OURS, against))
    return Figure(f"output tokens/s, {_at(streams)}", ours, against, theirs, at_least=at_least)


def _at(streams: int) -> str:
    return f"{streams} streams" if streams > 1 else "1 stream"


def processor(setup: Setup) -> Measured:
    """Measures the processor time of a token at 64 streams, minus that of the model and its
    sampler."""
    model = models.prepare("dot", setup.models)
    sizes = (_TOKEN_STREAMS, *SIZES)
    with (
        Client(setup.logs) as client,
        InterleavedRounds([servers.swell(model, setup, *SETTINGS)]) as clusters,
        InterleavedRounds([Worker(OURS, "model_compute.py", [model, *sizes], setup)]) as engines,
    ):

        def measure(server: Server) -> Numbers:
            before = server.cpu_time_s()
            vocab_size = models.SHAPES["dot"].vocab_size
            numbers = client.load(server, _TOKEN_STREAMS, _TOKEN_REQUESTS, vocab_size, SIZES)
            spent = server.cpu_time_s() - before
            return {**numbers, "us": 1e6 * spent / numbers["tokens"]}

        clusters.take(1, measure)
        whole = clusters.take(setup.repeats, measure).series(OURS, "us")
        computed = engines.take(setup.repeats, Worker.turn).series(OURS, "us_per_token")
    rest = [all_us - model_us for all_us, model_us in zip(whole, computed, strict=True)]
    at = f"{_TOKEN_STREAMS} streams"
    figures = [
        Figure(f"processor us/token except the model, {at}", rest, at_most=60.0),
        Figure(f"processor us/token of model and sampler, {at}", computed),
    ]
    return Measured(figures, clusters.problems)


CASES = {
    "tax-path": Case("m15: the cluster against one bare process", throughput),
    "tax-processor": Case("processor time of a token, all processes", processor),
}
