"""Engines that share experts, with tensors and sockets and without Ray: an answer is the same
whatever the number of engines, and whatever happens to the others meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from swell.configs.schema import Config, load
from swell.coordinator.channel import Outlet
from swell.coordinator.service import CoordinatorService
from swell.engine.core import EngineCore
from swell.engine.executor import build_executor
from swell.engine.server import EngineServer
from swell.engine.wire import EngineCoreOutputs, EngineCoreRequest
from swell.worker.sample.wire import SamplerParams

pytestmark = pytest.mark.slow

NANO_MOE = Path(__file__).resolve().parents[2] / "configs" / "models" / "nano-moe"
SOON_S = 60.0
PROMPTS = [[5, 6, 7, 8 + index] for index in range(4)]


class Engine:
    def __init__(self, config: Config, service: CoordinatorService, rank: int) -> None:
        executor = build_executor(config, workers_per_machine=2)
        core = EngineCore(config, executor, executor.start())
        self.server = EngineServer(config, rank, core, service.keys, service.address)
        self.outlet = Outlet(self.server.address, EngineCoreOutputs, service.keys)
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()
        self.received: dict[str, list[int]] = {}

    def submit(self, name: str, prompt: list[int], seed: int) -> None:
        sampler = SamplerParams(temperature=0.9 if seed % 2 else 0.0, seed=seed)
        self.outlet.send(EngineCoreRequest(name, prompt, sampler, max_tokens=40))

    def receive(self, count: int) -> list[list[int]]:
        """The next `count` answers, by name."""
        tokens: dict[str, list[int]] = {}
        ended: set[str] = set()
        while len(ended) < count:
            message = self.outlet.receive(SOON_S)
            assert message is not None, "no answer"
            for output in message.outputs:
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                ended |= {output.request_id} if output.finished else set()
        return [tokens[name] for name in sorted(tokens)]

    def stop(self) -> None:
        self.server.stop()
        self.server.core.executor.abort()
        self._thread.join(SOON_S)
        self.outlet.close()
        assert not self._thread.is_alive()


@pytest.fixture
def config() -> Config:
    return load(
        str(NANO_MOE),
        {
            "parallel.expert": True,
            "model.device": "cpu",
            "model.cpu_threads": 1,
            "cache.memory_bytes": 20_000_000,
        },
    )


@pytest.fixture
def service(config: Config) -> Iterator[CoordinatorService]:
    service = CoordinatorService(config.cluster, lockstep=True)
    yield service
    service.stop()


def answers(run: str, *engines: Engine) -> list[list[int]]:
    """Every prompt, spread over the engines."""
    for index, prompt in enumerate(PROMPTS):
        engines[index % len(engines)].submit(f"{run}{index}", prompt, index)
    count = len(PROMPTS) // len(engines)
    received = [engine.receive(count) for engine in engines]
    return [received[index % len(engines)][index // len(engines)] for index in range(len(PROMPTS))]


def test_an_answer_does_not_depend_on_the_number_of_engines(config, service) -> None:
    first = Engine(config, service, 0)
    service.join([first.server.member], SOON_S)
    alone = answers("a", first)
    second = Engine(config, service, 1)
    service.join([second.server.member], SOON_S)
    assert answers("b", first, second) == alone
    for index, prompt in enumerate(PROMPTS):
        second.submit(f"c{index}", prompt, index)
    first.stop()
    service.remove_failed([0])
    assert second.receive(len(PROMPTS)) == alone, "the remaining engine has its experts"
    second.stop()
