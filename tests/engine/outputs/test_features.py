"""Every feature of a completion has the same result over every way to stream, split, schedule,
cache, interrupt and move the work.

A site answers every feature in one kind of output. The kind rotates over features and sites, so
that all pairs of axis, feature and kind occur. `make test-slow` runs every feature in every kind.

The oracle is an engine that runs the same request by itself, one step at a time (`Plain`). Ids,
text, ranks, counts and reasons are compared exactly. On a CPU log probabilities are compared bit
for bit, also those of nano-moe, whose experts compute another number of rows in each batch. The
oracle has the same number of tensor ranks, because another number rounds differently. On a GPU log
probabilities are compared within float32's rounding. Sampled tokens are compared exactly there,
too: rounding changes a logit by about 1e-5, so one draw in some 10 000 could differ, but none of
the draws of these tests does (fixed seeds, derandomized examples).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, cached_property
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from swell.cluster.client.requests.outputs import RequestOutputKind
from swell.cluster.local import LLM
from swell.cluster.text.params.sampling_params import SamplingParams
from tests.engine.drafts.planted_drafts import Teacher, plant
from tests.engine.engine_harness import (
    DELTA,
    NANO,
    NANO_MOE,
    Answer,
    EngineHarness,
    Plain,
    assert_same,
    engine,
)
from tests.engine.executor.depth import record_depth
from tests.engine.outputs.features import FEATURES, STEADY, RequestSpec, request_specs
from tests.support.device import DEVICE

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Axis:
    """One way to schedule and run the work."""

    overrides: dict[str, Any] = field(default_factory=dict)
    engines: int = 1
    harness: dict[str, int] = field(default_factory=dict)
    is_scarce: bool = False
    """Whether blocks are so scarce that requests preempt each other."""
    is_warm: bool = False
    """Whether every request was answered once before."""
    is_handed_over: bool = False
    """Whether another engine has computed the prompts."""
    drafts: str = ""
    """The kind of drafts of the rows (see `planted_drafts.py`)."""


RAW = "raw_logprobs"
PROCESSED = {"model__logprobs_mode": "processed_logprobs"}
SCARCE = {"cache__block_tokens": 2, "cache__memory_bytes": 4096 * 50}
BY_THE_SAME = {"drafts__method": "model", "drafts__model": {"path": NANO}}
BY_CHANCE = {"drafts__method": "model", "drafts__model": {"path": NANO, "load_format": "dummy"}}
"""A draft model with random weights, which is rarely right. The heads have random weights, too."""
BY_EAGLE = {**BY_CHANCE, "drafts__method": "eagle"}
BY_EAGLE3 = {**BY_CHANCE, "drafts__method": "eagle3"}
BY_MTP = {**BY_CHANCE, "drafts__method": "mtp"}
AXES = {
    "one step in flight": Axis({"scheduler__steps_in_flight": 1}),
    "two steps in flight": Axis({"scheduler__steps_in_flight": 2}),
    "three steps in flight": Axis({"scheduler__steps_in_flight": 3}),
    "read rarely": Axis(harness={"patience": 5}),
    "an output every four tokens": Axis(harness={"stream_interval": 4}),
    "a budget of 7 tokens": Axis({"scheduler__max_tokens_per_step": 7}),
    "chunks of 5, three steps": Axis(
        {"scheduler__max_chunk_tokens": 5, "scheduler__steps_in_flight": 3}
    ),
    "scarce blocks": Axis(SCARCE, is_scarce=True),
    "scarce blocks, nothing cached, three steps": Axis(
        {**SCARCE, "cache__prefix_caching": False, "scheduler__steps_in_flight": 3}, is_scarce=True
    ),
    "recovered every 4 steps": Axis(harness={"recovered_every": 4}, is_scarce=True),
    "asleep every 15 steps, pipeline 2, drafts by n-grams": Axis(
        {"parallel__pipeline": 2, "drafts__method": "ngram", "drafts__min_match": 1},
        harness={"recovered_every": 15, "sleep_level": 1},
        is_scarce=True,
    ),
    "asleep without weights every 20 steps, tensor 2, two steps": Axis(
        {"parallel__tensor": 2, "scheduler__steps_in_flight": 2},
        harness={"recovered_every": 20, "sleep_level": 2},
        is_scarce=True,
    ),
    # Blocks of one token: whole prompts are found, but their last token is still computed.
    "a warm cache": Axis({"cache__block_tokens": 1}, is_warm=True),
    "pipeline 2, chunks of 9": Axis({"parallel__pipeline": 2, "scheduler__max_chunk_tokens": 9}),
    "two engines": Axis(engines=2),
    "prompts of another engine, tensor 2, two steps": Axis(
        {"parallel__tensor": 2, "scheduler__steps_in_flight": 2}, is_handed_over=True
    ),
    "prompts of another engine, pipeline 2, drafts by a model, scarce blocks": Axis(
        {
            **BY_THE_SAME,
            **SCARCE,
            "cache__memory_bytes": 3 * SCARCE["cache__memory_bytes"] // 2,
            "cache__offload_bytes": 8_000_000,
            "parallel__pipeline": 2,
        },
        is_handed_over=True,
        is_scarce=True,
    ),
    "prompts of another engine, drafts by EAGLE, recovered every 15 steps, two engines": Axis(
        {**BY_EAGLE, "scheduler__steps_in_flight": 2},
        engines=2,
        harness={"recovered_every": 15},
        is_handed_over=True,
        is_scarce=True,
    ),
    "sessions of two chunks, two steps, scarce blocks that go to the host": Axis(
        {**SCARCE, "cache__offload_bytes": 8_000_000, "scheduler__steps_in_flight": 2},
        harness={"chunks": 1},
        is_scarce=True,
    ),
    "sessions of two chunks, tensor 2, drafts by n-grams, recovered every 4 steps": Axis(
        {
            "parallel__tensor": 2,
            "drafts__method": "ngram",
            "drafts__min_match": 1,
            "cache__session_fraction": 1.0,
        },
        harness={"chunks": 1, "recovered_every": 4},
        is_scarce=True,
    ),
    "drafts by n-grams": Axis({"drafts__method": "ngram", "drafts__min_match": 1}),
    "drafts by a model that is right, two steps": Axis(
        {**BY_THE_SAME, "scheduler__steps_in_flight": 2}
    ),
    "drafts by a model that is wrong, chunks of 5, three steps": Axis(
        {**BY_CHANCE, "scheduler__max_chunk_tokens": 5, "scheduler__steps_in_flight": 3}
    ),
    "drafts by a model, scarce blocks that go to the host": Axis(
        {
            **BY_THE_SAME,
            **SCARCE,
            "cache__memory_bytes": 2 * SCARCE["cache__memory_bytes"],
            "cache__offload_bytes": 8_000_000,
        },
        is_scarce=True,
    ),
    "drafts by a model, a warm cache": Axis(
        {**BY_THE_SAME, "cache__block_tokens": 1}, is_warm=True
    ),
    "drafts by a model, pipeline 2, three steps": Axis(
        {**BY_THE_SAME, "parallel__pipeline": 2, "scheduler__steps_in_flight": 3}
    ),
    "drafts by a model, two engines": Axis(BY_THE_SAME, engines=2),
    "four steps per plan, three in flight": Axis(
        {"scheduler__steps_per_plan": 4, "scheduler__steps_in_flight": 3}
    ),
    "three steps per plan, scarce blocks that go to the host": Axis(
        {"scheduler__steps_per_plan": 3, **SCARCE, "cache__offload_bytes": 8_000_000},
        is_scarce=True,
    ),
    "three steps per plan, tensor 2, recovered every 4 plans": Axis(
        {"scheduler__steps_per_plan": 3, "parallel__tensor": 2},
        harness={"recovered_every": 4},
        is_scarce=True,
    ),
    "two steps per plan, pipeline 2, three in flight, two engines": Axis(
        {
            "scheduler__steps_per_plan": 2,
            "parallel__pipeline": 2,
            "scheduler__steps_in_flight": 3,
        },
        engines=2,
    ),
    "drafts by EAGLE-3, pipeline 2, three steps, chunks of 5": Axis(
        {
            **BY_EAGLE3,
            "parallel__pipeline": 2,
            "scheduler__steps_in_flight": 3,
            "scheduler__max_chunk_tokens": 5,
        }
    ),
    "drafts by EAGLE, tensor 2, asleep without weights every 20 steps": Axis(
        {**BY_EAGLE, "parallel__tensor": 2},
        harness={"recovered_every": 20, "sleep_level": 2},
        is_scarce=True,
    ),
    "drafts by EAGLE-3, two steps, scarce blocks that go to the host": Axis(
        {
            **BY_EAGLE3,
            **SCARCE,
            "cache__memory_bytes": 5 * SCARCE["cache__memory_bytes"] // 4,
            "cache__offload_bytes": 8_000_000,
            "scheduler__steps_in_flight": 2,
        },
        is_scarce=True,
    ),
    "drafts by EAGLE-3, a warm cache, two engines": Axis(
        {**BY_EAGLE3, "cache__block_tokens": 1}, is_warm=True, engines=2
    ),
    "drafts by MTP, two steps, chunks of 5, two engines": Axis(
        {**BY_MTP, "scheduler__steps_in_flight": 2, "scheduler__max_chunk_tokens": 5}, engines=2
    ),
    "right drafts, recovered every 4 steps": Axis(
        harness={"recovered_every": 4}, is_scarce=True, drafts="right"
    ),
    "wrong drafts, three steps, chunks of 5": Axis(
        {"scheduler__max_chunk_tokens": 5, "scheduler__steps_in_flight": 3}, drafts="wrong"
    ),
    "mixed drafts, two steps, scarce blocks": Axis(
        {**SCARCE, "scheduler__steps_in_flight": 2}, is_scarce=True, drafts="mixed"
    ),
    "mixed drafts, a warm cache": Axis({"cache__block_tokens": 1}, is_warm=True, drafts="mixed"),
    "mixed drafts, tensor 2": Axis({"parallel__tensor": 2}, drafts="mixed"),
    "mixed drafts, pipeline 2, three steps": Axis(
        {"parallel__pipeline": 2, "scheduler__steps_in_flight": 3}, drafts="mixed"
    ),
    "processed logprobs, mixed drafts, tensor 2": Axis(
        {**PROCESSED, "parallel__tensor": 2}, drafts="mixed"
    ),
    "processed logprobs, three steps per plan, scarce blocks": Axis(
        {**PROCESSED, **SCARCE, "scheduler__steps_per_plan": 3}, is_scarce=True
    ),
    "processed logprobs, a warm cache, two engines": Axis(
        {**PROCESSED, "cache__block_tokens": 1}, is_warm=True, engines=2
    ),
    "processed logprobs, recovered every 4 steps, pipeline 2, two steps": Axis(
        {**PROCESSED, "parallel__pipeline": 2, "scheduler__steps_in_flight": 2},
        harness={"recovered_every": 4},
        is_scarce=True,
    ),
}


EXPERT_AXES = (
    "chunks of 5, three steps",
    "scarce blocks, nothing cached, three steps",
    "recovered every 4 steps",
    "asleep without weights every 20 steps, tensor 2, two steps",
    "a warm cache",
    "two engines",
    "three steps per plan, tensor 2, recovered every 4 plans",
    "mixed drafts, pipeline 2, three steps",
)
"""The axes over which a mixture-of-experts model is served too: each kind once."""
SITES = {
    **{name: (NANO, axis) for name, axis in AXES.items()},
    **{f"experts, {name}": (NANO_MOE, AXES[name]) for name in EXPERT_AXES},
}
KINDS = tuple(RequestOutputKind)
EXAMPLES, SHARES = 32, 8
"""The number of examples of features together, and of the shares into which they are split. A site
runs one share; in `make test-slow` it runs all."""


class Site:
    """Engines of a model that run along an axis. `number`: the number of the site, which decides
    its kinds of output and its examples; None: the site runs all."""

    def __init__(self, model: str, axis: Axis, number: int | None) -> None:
        self.model, self.axis, self._number = model, axis, number
        overrides = {"drafts__method": "ngram"} if axis.drafts else {}
        self.engines: list[LLM] = []
        if not axis.is_handed_over:
            self.engines = [
                engine(model, **axis.overrides, **overrides) for _ in range(axis.engines)
            ]
        self._folder = TemporaryDirectory(prefix="swell-handover-", dir="/dev/shm")
        self.prefill: LLM | None = None
        if axis.is_handed_over:
            folder = {"cache__handover_folder": self._folder.name}
            self.prefill, *self.engines = [
                engine(model, **axis.overrides, **folder) for _ in range(1 + axis.engines)
            ]
        self.depths = [record_depth(llm._engine.core) for llm in self.engines]
        self.teacher = Teacher()
        for llm in self.engines if axis.drafts else ():
            self.teacher.watch(llm._engine.core)
            plant(llm._engine.core, axis.drafts, self.teacher)

    def answer(self, requested: Sequence[tuple[RequestSpec, RequestOutputKind]]) -> list[Answer]:
        """Answers all requests at once, so that each runs in a batch with others. Planted drafts
        know the answers from a first round."""
        if self.axis.drafts:
            self._answer(requested)
        return self._answer(requested)

    def _answer(self, requested: Sequence[tuple[RequestSpec, RequestOutputKind]]) -> list[Answer]:
        harness = EngineHarness(self.engines, prefill=self.prefill, **self.axis.harness)
        for at, (request_spec, kind) in enumerate(requested):
            harness.ask(request_spec, kind, at=at)
        return harness.run()

    @cached_property
    def features(self) -> dict[str, dict[RequestOutputKind, Answer]]:
        """Returns the answers of every feature in its output kinds, all in one batch."""
        requested = [
            (name, kind) for at, name in enumerate(FEATURES) for kind in self._kinds_of(at)
        ]
        crowd = [(FEATURES[name], kind) for name, kind in requested]
        if self.axis.is_warm:
            self.answer(crowd)
        found_tokens = self.num_hit_tokens
        answers: dict[str, dict[RequestOutputKind, Answer]] = {}
        for (name, kind), answer in zip(requested, self.answer(crowd), strict=True):
            answers.setdefault(name, {})[kind] = answer
        if self.axis.is_warm:
            assert self.num_hit_tokens - found_tokens > 10 * len(requested)
        depth = self.axis.overrides.get("scheduler__steps_in_flight")
        assert depth is None or {max(depths) for depths in self.depths} == {depth}
        return answers

    def _kinds_of(self, feature: int) -> Sequence[RequestOutputKind]:
        if self._number is None:
            return KINDS
        return [KINDS[(self._number + feature) % len(KINDS)]]

    def runs(self, requested: Sequence[tuple[RequestSpec, RequestOutputKind]]) -> bool:
        """Whether this example belongs to the share of the site."""
        share = zlib.crc32(b"".join(request_spec.key for request_spec, _ in requested)) % SHARES
        return self._number is None or share == self._number % SHARES

    @property
    def has_drafts(self) -> bool:
        return self.engines[0]._engine.core.scheduler.drafter.num_drafts > 0

    @property
    def num_hit_tokens(self) -> int:
        return sum(llm._engine.core.scheduler.kv.num_hit_tokens for llm in self.engines)

    def close(self) -> None:
        for llm in (*self.engines, *([self.prefill] if self.prefill else ())):
            llm.close()
        files = [name for _, _, names in os.walk(self._folder.name) for name in names]
        # after a loss, imports are not read for a while
        losses = "recovered_every" in self.axis.harness
        assert not files or losses, "each file was read"
        self._folder.cleanup()


Plains = Callable[[str, int, str], Plain]


@pytest.fixture(scope="module")
def plains() -> Iterator[Plains]:
    """Yields a function from model, tensor ranks and mode of log probabilities to the oracle; each
    oracle is made once."""
    with ExitStack() as stack:

        @cache
        def oracle(model: str, tensor: int, logprobs_mode: str) -> Plain:
            plain = Plain(model, tensor, logprobs_mode)
            stack.callback(plain.close)
            return plain

        yield oracle


@pytest.fixture(scope="module")
def plain(plains: Plains) -> Plain:
    return plains(NANO, 1, RAW)


EVERY_KIND = ", every kind"


@pytest.fixture(
    scope="module",
    params=[
        *SITES,
        *(pytest.param(name + EVERY_KIND, marks=pytest.mark.slow_variants) for name in SITES),
    ],
)
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    name = request.param.removesuffix(EVERY_KIND)
    number = None if request.param.endswith(EVERY_KIND) else [*SITES].index(name)
    site = Site(*SITES[name], number)
    yield site
    site.close()


@pytest.fixture(scope="module")
def oracle(site: Site, plains: Plains) -> Plain:
    """Returns the oracle that rounds like the site's engines."""
    overrides = site.axis.overrides
    mode = overrides.get("model__logprobs_mode", RAW)
    return plains(site.model, overrides.get("parallel__tensor", 1), mode)


# ---------------------------------------------------------------- the features are there

TRACELESS = {("a stop that almost comes", "stop")}
"""Requests whose text is held back and released, without an effect on the answer."""


@pytest.mark.parametrize("name", FEATURES)
def test_each_field_of_a_feature_changes_its_answer(name: str, plain: Plain) -> None:
    """A feature changes its answer: without any one of its fields the answer differs, so that a
    lost field cannot pass the tests below."""
    request_spec, default = FEATURES[name], SamplingParams()
    assert plain(request_spec).is_firm, "rounding may decide a token: choose another seed"
    for field_name in SamplingParams.__struct_fields__:
        is_shape = field_name in ("seed", "max_tokens") or (name, field_name) in TRACELESS
        is_greedy = field_name == "temperature" and not request_spec.params.temperature
        if is_shape or is_greedy:
            continue
        usual = getattr(default, field_name)
        if getattr(request_spec.params, field_name) != usual:
            params = msgspec.structs.replace(request_spec.params, **{field_name: usual})
            assert plain(RequestSpec(request_spec.prompt, params)) != plain(request_spec), (
                field_name
            )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("greedy", "Grüß dich, Orozecud! 🍀"),
        ("stop", "3, 4, "),
        ("a stop within characters", "Gr"),
        ("a stop that almost comes", "ABCDEFGH"),
        ("a stop that is shown", "3, 4, 5, 6"),
        ("stop_token_ids", "3, 4, 5, "),
    ],
)
def test_the_oracle_returns_the_trained_answer(name: str, text: str, plain: Plain) -> None:
    """The oracle returns the answer that the model was trained for, up to its last token."""
    assert plain(FEATURES[name]).parts[0].text == text


def test_seeds_matter(plain: Plain) -> None:
    request_spec = FEATURES["temperature and seed"]
    texts = [
        plain(
            RequestSpec(
                request_spec.prompt, msgspec.structs.replace(request_spec.params, seed=seed)
            )
        )
        .parts[0]
        .text
        for seed in (11, 12, 13)
    ]
    assert len(set(texts)) == 3


# ---------------------------------------------------------------- over the axes


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_over_an_axis(name: str, site: Site, oracle: Plain) -> None:
    want = oracle(FEATURES[name])
    answers = site.features[name]
    for answer in answers.values():
        assert_same(answer, want)
    ranked = FEATURES[name].params.best_of is not None
    is_one_by_one = "scheduler__steps_per_plan" not in site.axis.overrides
    streams = DELTA in answers and not site.axis.harness and not site.has_drafts
    if streams and is_one_by_one and not ranked:
        tokens = sum(part.num_output_tokens for part in want.parts.values())
        assert answers[DELTA].num_outputs >= tokens - 1, "it streams"


def test_requests_are_preempted_if_blocks_are_scarce(site: Site) -> None:
    """Many features are preempted if blocks are scarce; some answers are too short for that."""
    preempted = {
        name
        for name, answers in site.features.items()
        if any(answer.preemptions for answer in answers.values())
    }
    if site.axis.is_scarce:
        assert len(preempted) > 0.4 * len(FEATURES), preempted
    else:
        assert not preempted


def test_drafts_are_accepted_as_often_as_they_are_right(site: Site) -> None:
    assert site.features
    drafter = site.engines[0]._engine.core.scheduler.drafter
    if site.axis.drafts:
        assert drafter.num_drafts > 200
    if "drafts__model" in site.axis.overrides:
        assert drafter.num_drafts > 100
    share = drafter.num_accepted / max(1, drafter.num_drafts)
    low, high = {"right": (0.9, 1.0), "wrong": (0.0, 0.0), "mixed": (0.3, 0.9)}.get(
        site.axis.drafts, (0.0, 1.0)
    )
    assert low <= share <= high


@settings(STEADY, max_examples=EXAMPLES)
@given(
    requested=st.lists(
        st.tuples(request_specs(), st.sampled_from(RequestOutputKind)), min_size=1, max_size=4
    )
)
def test_features_together_over_an_axis(
    requested: list[tuple[RequestSpec, RequestOutputKind]], site: Site, oracle: Plain
) -> None:
    if not site.runs(requested):
        return
    assume(DEVICE == "cpu" or all(oracle(request_spec).is_firm for request_spec, _ in requested))
    for (request_spec, _), answer in zip(requested, site.answer(requested), strict=True):
        assert_same(answer, oracle(request_spec))


# ---------------------------------------------------------------- resumption


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[LLM, LLM]]:
    """Yields two engines with different schedules. Both compute prompts in chunks, so a request can
    move within its prompt."""
    here = engine(scheduler__max_rows=32, scheduler__max_chunk_tokens=7)
    there = engine(
        scheduler__max_rows=32,
        scheduler__max_chunk_tokens=9,
        scheduler__steps_in_flight=1,
        cache__block_tokens=4,
    )
    yield here, there
    here.close()
    there.close()


@pytest.mark.parametrize("name", FEATURES)
def test_an_answer_continues_from_every_token(
    name: str, pair: tuple[LLM, LLM], plain: Plain
) -> None:
    """An answer continues on another engine after each output of the first, also after one that
    reports only the prompt."""
    request_spec = FEATURES[name]
    want = plain(request_spec)
    harness, longest = (
        EngineHarness(pair),
        max(part.num_output_tokens for part in want.parts.values()),
    )
    kinds = list(RequestOutputKind)
    cuts = range(1, longest + 8)
    for cut in cuts:
        harness.ask(request_spec, kinds[cut % 3], cuts=[cut])
    for answer in harness.run():
        assert_same(answer, want)
    assert harness.num_moves >= (longest - 1) * len(want.parts), "every move took place"
