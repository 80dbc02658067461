"""The time from the command to `ready`, and the processor time of an idle cluster."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.benchmarks import models, servers
from tests.benchmarks.case import PEERS, Case, Measured, Setup
from tests.benchmarks.interleaved import OURS, InterleavedRounds, Numbers
from tests.benchmarks.machine import ROOT
from tests.benchmarks.results import Figure
from tests.benchmarks.servers import Server

_DEMO = ROOT / "configs" / "demo.yaml"
_SETTLE_S, _IDLE_S = 3.0, 20.0


class Start:
    """A contender that starts and stops in its turn."""

    def __init__(self, name: str, make: Callable[[], Server]) -> None:
        self.name = name
        self._make = make
        self._server: Server | None = None

    def start(self) -> None:
        """Does nothing: it starts in its turn."""

    def turn(self) -> Numbers:
        self._server = self._make()
        self._server.start()
        time.sleep(_SETTLE_S)
        share = self._server.cpu_share(_IDLE_S)
        numbers = {"start_s": self._server.start_s, "idle_percent": 100 * share}
        self.close()
        return numbers

    def pause(self) -> None:
        """Does nothing: it only runs in its turn."""

    def resume(self) -> None:
        """Does nothing, see `pause`."""

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = None


def run(setup: Setup) -> Measured:
    """Measures the demo, and vLLM's server with the smallest model."""
    contenders = [Start(OURS, lambda: servers.swell(_DEMO, setup))]
    if "vllm" in setup.peers:
        tiny = models.prepare("tiny", setup.models)
        contenders.append(Start("vllm", lambda: servers.vllm(tiny, setup)))
    with InterleavedRounds(contenders) as turns:
        rounds = turns.take(setup.repeats, Start.turn)
    started = rounds.series(OURS, "start_s")
    figures = [
        Figure("start to ready, s", started, at_most=15.0),
        Figure("idle, % of a core", rounds.series(OURS, "idle_percent"), at_most=2.0),
    ]
    if "vllm" in rounds:
        theirs = rounds.series("vllm", "start_s")
        figures.insert(1, Figure("start to ready, s", started, PEERS["vllm"].title, theirs))
    return Measured(figures, turns.problems)


CASES = {"start": Case("the demo: start to ready, then 20 s of idling", run)}
