"""The experts of each token are those of transformers' router, over every way to split, schedule,
cache, interrupt and move the work, and for any request that filled the cache."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from swell.cluster.client.requests.outputs import RequestOutputKind
from swell.cluster.client.requests.routed_experts import RoutedExpertsTable
from swell.cluster.local import LLM
from swell.cluster.text.errors import BadRequest
from swell.cluster.text.params.sampling_params import SamplingParams
from tests.engine.drafts.planted_drafts import Teacher, plant
from tests.engine.engine_harness import NANO, NANO_MOE, Answer, EngineHarness, engine
from tests.engine.outputs.features import COUNT, GREET, PROMPTS, UPPER, RequestSpec, request_spec
from tests.engine.outputs.test_features import AXES, SCARCE, Axis
from tests.worker import tiny_models

pytestmark = pytest.mark.slow

MARGIN = 1e-4
"""Router logits that differ by less may change places through rounding."""
OFFLOAD = {"cache__offload_bytes": 400_000, "cache__offload_disk_bytes": 400_000}
ROUTE_AXES = {
    **AXES,
    "offloaded blocks": Axis({**SCARCE, **OFFLOAD}, is_scarce=True, is_warm=True),
    "pipeline 2 with offloaded blocks": Axis(
        {**SCARCE, **OFFLOAD, "cache__memory_bytes": 2048 * 50, "parallel__pipeline": 2},
        is_scarce=True,
        is_warm=True,
    ),
}
ALL = [
    request_spec(prompt, return_routed_experts=True, max_tokens=16, ignore_eos=True)
    for prompt in PROMPTS
] + [
    request_spec(GREET, return_routed_experts=True, n=2, temperature=2.0),
    request_spec(COUNT, return_routed_experts=True, stop=["5", ", 4"], prompt_logprobs=1),
    request_spec(UPPER, return_routed_experts=True, logprobs=1, max_tokens=1),
]
OTHERS = [request_spec(prompt, max_tokens=9) for prompt in PROMPTS]
"""Requests that fill the cache without asking for routed experts."""


class Model:
    """A model folder, and the experts that transformers selects for any tokens."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.top_k = self._model.config.num_experts_per_tok
        self._router_logits: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.no_grad()
    def router_logits(self, token_ids: list[int]) -> torch.Tensor:
        """Returns [tokens, layers with experts, experts]. Computes them once for each list of
        tokens, because most answers are the same over every axis."""
        key = tuple(token_ids)
        if key not in self._router_logits:
            found = self._model(torch.tensor([token_ids]), output_router_logits=True)
            layers = [layer.view(len(token_ids), -1) for layer in found.router_logits]
            self._router_logits[key] = torch.stack(layers, 1)
        return self._router_logits[key]

    def check(self, table: RoutedExpertsTable | None, token_ids: list[int]) -> None:
        """Checks the table against transformers; `token_ids` are those of prompt and answer."""
        assert table is not None and table.num_tokens == len(token_ids) - 1
        logits = self.router_logits(token_ids[:-1])
        got = np.frombuffer(table.data, dtype="<i2" if table.wide else np.uint8)
        got = torch.from_numpy(got.astype(np.int64)).view(*logits.shape[:2], self.top_k)
        assert len(table.layers) == logits.shape[1]
        values, want = logits.sort(-1, descending=True)
        gaps = (values[..., : self.top_k] - values[..., 1 : self.top_k + 1]).min(-1).values
        firm = gaps > MARGIN
        assert firm.float().mean() > 0.9
        assert torch.equal(got[firm], want[..., : self.top_k][firm])


MODELS = ("nano-moe", "qwen3_moe-mixed")
"""All layers have experts, or one of two."""


def pairs() -> Iterator[object]:
    """Yields every axis with both models. `make test` runs it with one of them, in turn."""
    for at, name in enumerate(ROUTE_AXES):
        for number, model in enumerate(MODELS):
            marks = [pytest.mark.slow_variants] if (at + number) % 2 else []
            yield pytest.param(name, model, marks=marks)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Returns a function from a name to its model; each model is made once."""

    @cache
    def find(name: str) -> Model:
        if name == "nano-moe":
            return Model(NANO_MOE)
        folder = tmp_path_factory.mktemp("moe")
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(Path(NANO) / file, folder)
        tiny_models.make(folder, name)
        return Model(str(folder))

    return find


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, models: Callable[[str], Model]) -> Model:
    return models(request.param)


def routing(model: Model, **overrides: Any) -> LLM:
    return engine(model.folder, **{"model__routed_experts": True, **overrides})


def check(model: Model, specs: list[RequestSpec], answers: list[Answer]) -> None:
    for spec, answer in zip(specs, answers, strict=True):
        for part in answer.parts.values():
            if spec.params.return_routed_experts:
                model.check(part.routed_experts, answer.prompt_token_ids + part.token_ids)
            else:
                assert part.routed_experts is None


@pytest.mark.parametrize(("name", "model"), pairs(), indirect=["model"])
def test_over_an_axis(name: str, model: Model) -> None:
    axis = ROUTE_AXES[name]
    drafts = {"drafts__method": "ngram"} if axis.drafts else {}
    engines = [routing(model, **axis.overrides, **drafts) for _ in range(axis.engines)]
    teacher = Teacher()
    for llm in engines if axis.drafts else ():
        teacher.watch(llm._engine.core)
        plant(llm._engine.core, axis.drafts, teacher)
    specs = [one for pair in zip(ALL, [*OTHERS, *OTHERS], strict=False) for one in pair]
    kinds = list(RequestOutputKind)
    preempted = 0
    try:
        for _ in range(1 + (axis.is_warm or bool(axis.drafts))):
            harness = EngineHarness(engines, **axis.harness)
            for at, spec in enumerate(specs):
                harness.ask(spec, kinds[at % 3], at=at)
            answers = harness.run()
            preempted += sum(answer.preemptions for answer in answers)
            check(model, specs, answers)
        hits = sum(llm._engine.core.scheduler.kv.num_hit_tokens for llm in engines)
        assert not axis.is_warm or hits > 100
        assert not axis.is_scarce or preempted
        loaded = sum(llm._engine.core.scheduler.kv.offload.num_loaded for llm in engines)
        assert "cache__offload_bytes" not in axis.overrides or loaded > 20
    finally:
        for llm in engines:
            llm.close()


@pytest.fixture(scope="module")
def pair(model: Model) -> Iterator[list[LLM]]:
    engines = [
        routing(model, scheduler__max_rows=32, scheduler__max_chunk_tokens=7),
        routing(model, scheduler__max_rows=32, cache__block_tokens=4),
    ]
    yield engines
    for llm in engines:
        llm.close()


def test_over_moves(model: Model, pair: list[LLM]) -> None:
    """Routed experts are complete if an answer continues on another engine after any of its
    outputs."""
    harness, specs = EngineHarness(pair), []
    for cut in range(1, 20):
        for spec in (ALL[0], ALL[1], ALL[7]):
            harness.ask(spec, list(RequestOutputKind)[cut % 3], cuts=[cut])
            specs.append(spec)
    answers = harness.run()
    assert harness.num_moves > 30
    check(model, specs, answers)


def test_experts_of_a_cached_prefix_are_reported(model: Model) -> None:
    """Routed experts are known for a cached prompt, although the request that computed it did not
    ask for them."""
    llm = routing(model, cache__block_tokens=1)
    try:
        for spec in (request_spec(COUNT, max_tokens=4), ALL[0]):
            harness = EngineHarness([llm])
            harness.ask(spec, RequestOutputKind.FINAL_ONLY)
            check(model, [spec], harness.run())
        assert llm._engine.core.scheduler.kv.num_hit_tokens > 10
    finally:
        llm.close()


def test_a_server_that_does_not_record_refuses() -> None:
    llm = engine(NANO_MOE)
    try:
        with pytest.raises(BadRequest, match=r"return_routed_experts.*model\.routed_experts"):
            llm.generate("a", SamplingParams(return_routed_experts=True))
    finally:
        llm.close()


@pytest.mark.parametrize(("folder", "backend"), [(NANO, "auto"), (NANO_MOE, "transformers")])
def test_a_model_without_experts_is_refused(folder: str, backend: str) -> None:
    with pytest.raises(ValueError, match=r"model\.routed_experts=true needs a mixture of experts"):
        engine(folder, model__routed_experts=True, model__backend=backend)
