"""Engines that share experts, with tensors and sockets but without Ray. An answer, including the
bits of its log probabilities, does not depend on the number of engines, on what else they compute,
or on what happens to the other engines."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from swell.configs.drafts import DraftModelConfig
from swell.configs.schema import Config, load
from swell.coordinator.service import CoordinatorService
from swell.coordinator.transport.channel import Outlet
from swell.engine.core import EngineCore
from swell.engine.executor import build_executor
from swell.engine.serving.server import EngineServer
from swell.engine.wire import EngineCoreOutputs, EngineCoreRequest, FinishReason
from swell.worker.sampler_wire import PromptLogprobs, RoutedExperts, SamplerParams, TokenLogprobs
from tests.engine.drafts.planted_drafts import plant
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

NANO_MOE = Path(__file__).resolve().parents[2] / "configs" / "models" / "nano-moe"
PROMPTS = [[5, 6, 7, 8 + index] for index in range(4)]


class Engine:
    def __init__(self, config: Config, service: CoordinatorService, rank: int) -> None:
        executor = build_executor(config, workers_per_machine=2)
        core = EngineCore(config, executor, executor.start())
        self.server = EngineServer(config, rank, core, service.keys, service.address)
        self.outlet = Outlet(self.server.address, EngineCoreOutputs, service.keys)
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()
        self.routes: dict[str, bytes] = {}
        """The routed experts of each answer, in order of arrival."""
        self.logprobs: dict[str, list[TokenLogprobs | PromptLogprobs]] = {}
        """The log probabilities of each answer, in order of arrival."""
        self._is_stopped = False

    def submit(self, name: str, prompt: list[int], seed: int) -> None:
        routed = self.server.core.config.model.routed_experts
        temperature = 0.9 if seed % 2 else 0.0
        sampler = SamplerParams(
            temperature=temperature,
            seed=seed,
            routed_experts=routed,
            logprobs=2,
            prompt_logprobs=0 if seed > 1 else None,
        )
        skips = sampler.prompt_logprobs is not None
        self.outlet.send(
            EngineCoreRequest(name, prompt, sampler, max_tokens=40, skip_prefix_cache=skips)
        )

    def receive(self, count: int) -> list[tuple[list[int], Any]]:
        """Returns tokens and log probabilities of the next `count` answers, by name."""
        tokens: dict[str, list[int]] = {}
        ended: set[str] = set()
        while len(ended) < count:
            message = self.outlet.receive(HANG_S)
            assert message is not None, "no answer"
            for output in message.outputs:
                name = output.request_id
                assert output.finish_reason in (None, FinishReason.LENGTH), output
                tokens.setdefault(name, []).extend(output.new_token_ids)
                for extra in output.extras:
                    if not isinstance(extra, RoutedExperts):
                        assert isinstance(extra, TokenLogprobs | PromptLogprobs)
                        self.logprobs.setdefault(name, []).append(extra)
                        continue
                    known = self.routes.get(name, b"")
                    assert len(known) == extra.start * extra.token_bytes
                    self.routes[name] = known + extra.data
                ended |= {name} if output.finished else set()
        return [(tokens[name], self.logprobs[name]) for name in sorted(tokens)]

    def stop(self) -> None:
        if self._is_stopped:
            return
        self._is_stopped = True
        self.server.stop()
        deadline = time.monotonic() + HANG_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            self.server.core.executor.abort()  # also aborts a group that it was forming
            self._thread.join(0.5)
        self.outlet.close()
        frame = sys._current_frames().get(self._thread.ident or 0)
        assert not self._thread.is_alive(), "".join(traceback.format_stack(frame))


@pytest.fixture
def config() -> Config:
    return load(
        str(NANO_MOE),
        {
            "parallel.expert": True,
            "model.device": "cpu",
            "model.cpu_threads": 1,
            "cache.memory_bytes": 20_000_000,
            "cluster.stall_timeout_s": HANG_S,  # no client here sends keep-alives
        },
    )


@pytest.fixture
def service(config: Config) -> Iterator[CoordinatorService]:
    service = CoordinatorService(config.cluster, lockstep=True)
    yield service
    service.stop()


@pytest.fixture
def start(config: Config, service: CoordinatorService) -> Iterator[Callable[..., Engine]]:
    """Yields a function that starts engines, which are always stopped: others would wait for their
    group."""
    started: list[Engine] = []

    def start(rank: int, config: Config = config) -> Engine:
        started.append(Engine(config, service, rank))
        return started[-1]

    yield start
    # all servers first, because an engine that lost its peer would form a group again
    for engine in started:
        engine.server.stop()
    for engine in started:
        engine.stop()


def answers(run: str, *engines: Engine) -> list[tuple[list[int], Any]]:
    """Submits every prompt, spread over the engines; returns the answers in order of the
    prompts."""
    for index, prompt in enumerate(PROMPTS):
        engines[index % len(engines)].submit(f"{run}{index}", prompt, index)
    count = len(PROMPTS) // len(engines)
    received = [engine.receive(count) for engine in engines]
    return [received[index % len(engines)][index // len(engines)] for index in range(len(PROMPTS))]


@pytest.mark.parametrize("balance", [{}, {"balance_steps": 5, "redundant_experts": 2}])
def test_an_answer_does_not_depend_on_the_number_of_engines(
    config, service, start, balance
) -> None:
    """An answer does not depend on the number of engines, the placement of their experts, or its
    changes."""
    config = structs.replace(config, parallel=structs.replace(config.parallel, **balance))
    first = start(0, config)
    service.join([first.server.member], HANG_S)
    alone = answers("a", first)
    second = start(1, config)
    service.join([second.server.member], HANG_S)
    assert answers("b", first, second) == alone
    layers = first.server.core.executor._worker.model.moe_layers()
    assert any(layer.owners is not None for layer in layers) == bool(balance)
    for index, prompt in enumerate(PROMPTS):
        second.submit(f"c{index}", prompt, index)
    first.stop()
    service.remove_failed([0])
    assert second.receive(len(PROMPTS)) == alone, "the remaining engine has its experts"


def test_routed_experts_of_engines_that_share_experts(config, service, start) -> None:
    """Routed experts have the model's expert numbers, wherever an expert is placed."""
    config = structs.replace(config, model=structs.replace(config.model, routed_experts=True))
    first = start(0, config)
    service.join([first.server.member], HANG_S)
    alone = answers("a", first)
    second = start(1, config)
    service.join([second.server.member], HANG_S)
    assert answers("b", first, second) == alone
    for index, prompt in enumerate(PROMPTS):
        routes = (first, second)[index % 2].routes[f"b{index}"]
        assert routes == first.routes[f"a{index}"]
        assert len(set(routes)) > 4 and len(routes) >= (len(prompt) + 38) * 8


@pytest.mark.parametrize("method", ["ngram", "model"])
def test_drafts_of_engines_that_share_experts(config, service, start, method: str) -> None:
    """With drafts, an engine computes several tokens of a row while the other one computes one or
    none. A draft model has all its experts and is in no group."""
    plain = start(0)
    service.join([plain.server.member], HANG_S)
    alone = answers("a", plain)
    plain.stop()
    service.remove_failed([0])
    known = {tuple(prompt): tokens for prompt, (tokens, _) in zip(PROMPTS, alone, strict=True)}
    small = DraftModelConfig(path=str(NANO_MOE)) if method == "model" else None
    drafts = structs.replace(config.drafts, method=method, model=small)
    config = structs.replace(config, drafts=drafts)
    engines = [start(rank, config) for rank in (1, 2)]
    for engine in engines if method == "ngram" else ():
        plant(engine.server.core, "mixed", lambda core: known[tuple(core.prompt_token_ids)])
    service.join([engine.server.member for engine in engines], HANG_S)
    assert answers("b", *engines) == alone
    drafters = [engine.server.core.scheduler.drafter for engine in engines]
    counts = [(drafter.num_accepted, drafter.num_drafts) for drafter in drafters]
    (greedy, of_greedy), (drawn, of_drawn) = counts
    assert 0 < greedy <= of_greedy and 0 < drawn < of_drawn
    assert (greedy == of_greedy) == (method == "model"), "it is the same model"
