"""An answer that loses its engine equals the undisturbed one: every feature, two real engines, any
number of moves.

There are no sockets and no clock: the `EngineHarness` of `tests/engine/engine_harness.py` steps
both engines by hand, and `RequestState.engine_request` carries the request's output so far to the
other one. The oracle is the same payload by itself on one engine (`Plain`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from swell.cluster.client.requests.outputs import RequestOutputKind
from swell.cluster.local import LLM
from tests.engine.engine_harness import EngineHarness, Plain, assert_same, engine
from tests.engine.outputs.features import FEATURES, STEADY, request_specs

pytestmark = pytest.mark.slow

KINDS = st.sampled_from(RequestOutputKind)
CUTS = st.lists(st.integers(1, 20), min_size=1, max_size=4, unique=True)
TWO_LAYOUTS = 1e-4
"""Tolerance of a log probability: two tensor-parallel ranks add in another order than one."""
PATIENCE = st.integers(1, 6)
"""Steps between two reads of the outputs by the client."""


@pytest.fixture(scope="module")
def plain() -> Iterator[Plain]:
    oracle = Plain()
    yield oracle
    oracle.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[LLM, LLM]]:
    """The first engine uses chunked prefill with three steps in flight. The second one uses two
    tensor-parallel ranks and has little cache, so that moved requests are also preempted."""
    here = engine(scheduler__steps_in_flight=3, scheduler__max_tokens_per_step=11)
    there = engine(
        parallel__tensor=2,
        cache__block_tokens=2,
        cache__memory_bytes=2048 * 100,
        cache__prefix_caching=False,
    )
    yield here, there
    here.close()
    there.close()


@pytest.mark.parametrize("name", FEATURES)
@settings(STEADY, max_examples=2)
@given(
    asked=st.lists(st.tuples(KINDS, CUTS, st.integers(0, 1)), min_size=2, max_size=4),
    patience=PATIENCE,
)
def test_a_feature_survives_the_loss_of_its_engine(
    name: str,
    asked: list[tuple[RequestOutputKind, list[int], int]],
    patience: int,
    pair: tuple[LLM, LLM],
    plain: Plain,
) -> None:
    """Each request is sent several times in parallel. Each copy begins and moves independently."""
    desk = EngineHarness(pair, patience=patience, tolerance=TWO_LAYOUTS)
    for kind, cuts, at in asked:
        desk.ask(FEATURES[name], kind, cuts=cuts, at=at)
    for answer in desk.run():
        assert_same(answer, plain(FEATURES[name]))


@settings(STEADY, max_examples=20)
@given(
    asked=st.lists(st.tuples(request_specs(), KINDS, CUTS), min_size=1, max_size=4),
    patience=PATIENCE,
)
def test_combined_features_survive_the_loss_of_their_engines(asked, patience, pair, plain) -> None:
    assume(all(plain(payload).is_firm for payload, _, _ in asked))
    desk = EngineHarness(pair, patience=patience, tolerance=TWO_LAYOUTS)
    for at, (payload, kind, cuts) in enumerate(asked):
        desk.ask(payload, kind, cuts=cuts, at=at)
    for (payload, _, _), answer in zip(asked, desk.run(), strict=True):
        assert_same(answer, plain(payload))
