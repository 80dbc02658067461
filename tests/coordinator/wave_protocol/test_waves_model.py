"""The wave protocol in every order of events: exhaustive within bounds, sampled beyond them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.kernels.inputs import Bucket
from swell.worker.step.buckets import EngineStep
from tests.coordinator.wave_protocol.model import Eager, Model
from tests.coordinator.wave_protocol.model_checker import BOUNDS, E1, K1, K2, Scenario, explore
from tests.coordinator.wave_protocol.model_mutations import RULES, remove
from tests.coordinator.wave_protocol.model_state import Bounds, Engine, Violation

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", BOUNDS)
def test_every_order_of_events_becomes_quiescent(name: str) -> None:
    assert explore(BOUNDS[name]).states > 50


@pytest.mark.parametrize("name", RULES)
def test_no_rule_is_superfluous(name: str) -> None:
    rule = RULES[name]
    with pytest.raises(Violation):
        explore(BOUNDS[rule.bounds], limit=20_000, **remove(rule))


class KeepsCaptures(Model):
    def captured_when_joining(self, engine: Engine) -> frozenset[Bucket]:
        return engine.captured


@pytest.mark.parametrize("name", ["captures, newcomer", "captures, repair"])
def test_captures_are_dropped_when_an_engine_joins_a_group(name: str) -> None:
    """If an engine kept its captures, it would replay a step that another engine captures."""
    with pytest.raises(Violation, match="replays a step that another engine captures"):
        explore(BOUNDS[name], limit=200_000, make_model=KeepsCaptures)


class OwnBucket(Model):
    def computed(self, steps: list[EngineStep], at: int) -> Bucket | Eager:
        return super().computed([steps[at]], 0)


class LayersWithoutTokens(Model):
    def computed(self, steps: list[EngineStep], at: int) -> Bucket | Eager:
        computed = super().computed(steps, at)
        if isinstance(computed, Bucket) and not steps[at].tokens:
            return Eager.LAYERS_WITH_EXPERTS
        return computed


class NothingWithoutTokens(Model):
    def computed(self, steps: list[EngineStep], at: int) -> Bucket | Eager:
        return super().computed(steps, at) if steps[at].tokens else Eager.NOTHING


class BucketOfTheFirst(Model):
    def computed(self, steps: list[EngineStep], at: int) -> Bucket | Eager:
        return super().computed([step for step in steps if step.tokens][:1] or steps, at)


class EagerIfAnEngineIsIdle(Model):
    def computed(self, steps: list[EngineStep], at: int) -> Bucket | Eager:
        if any(step.tokens for step in steps) and not all(step.tokens for step in steps):
            return Eager.LAYERS_WITH_EXPERTS
        return super().computed(steps, at)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (OwnBucket, "the engines compute .* in one step"),
        (LayersWithoutTokens, "the engines compute .* in one step"),
        (NothingWithoutTokens, "the engines compute .* in one step"),
        (BucketOfTheFirst, "has no room for"),
        (EagerIfAnEngineIsIdle, "is not replayed"),
    ],
)
@pytest.mark.parametrize("name", ["captures", "captures, four requests"])
def test_all_engines_replay_the_bucket_of_the_largest_step(
    name: str, fault: type[Model], message: str
) -> None:
    with pytest.raises(Violation, match=message):
        explore(BOUNDS[name], limit=200_000, make_model=fault)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_steps_without_rows_at_the_end_of_a_wave(depth: int) -> None:
    """A wave ends with at most `depth - 1` steps without rows or votes. If the last step of the
    requests is known in advance, its sums show it, and `depth - 1` steps are in flight after it. If
    it is recognized when it is read, the sums of the next submitted step show it, and just as many
    are in flight after that."""
    assert explore(Bounds(2, depth, (K1, K2))).most_quiet == depth - 1
    assert explore(Bounds(2, depth, (E1, K1))).most_quiet == depth


@settings(max_examples=60, deadline=None)
@given(
    engines=st.integers(3, 5),
    depth=st.integers(1, 4),
    jobs=st.lists(
        st.tuples(st.sampled_from(["known", "eos", "stepwise"]), st.integers(1, 4)), max_size=8
    ),
    accidents=st.fixed_dictionaries(
        {
            name: st.integers(0, most)
            for name, most in [
                ("newcomers", 2), ("pauses", 3), ("detaches", 2), ("deaths", 3), ("losses", 3),
                ("restarts", 3), ("late_reports", 4), ("errors", 3), ("drops", 3),
                ("alones", 3),
            ]
        }
    ),
    choices=st.lists(st.integers(0, 10_000), max_size=300),
)  # fmt: skip
def test_any_walk_becomes_quiescent(
    engines: int,
    depth: int,
    jobs: list[tuple[str, int]],
    accidents: dict[str, int],
    choices: list[int],
) -> None:
    bounds = Bounds(engines, depth, tuple(jobs), reports=True, captures=True, **accidents)
    scenario = Scenario(bounds)
    for choice in choices:
        possible = scenario.moves()
        if not possible:
            break
        scenario.take(possible[choice % len(possible)])
    scenario.rest()
