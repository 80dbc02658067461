"""Engines join, leave and die; experts move with them, and answers do not change."""

from __future__ import annotations

from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swell.kernels.linear import PackedTensor
from swell.worker.comm.mesh import GroupError
from swell.worker.memory import kv_cache
from swell.worker.moe import experts
from swell.worker.moe.experts import place_experts
from swell.worker.wire import GroupPlan
from tests.support.deadlines import HANG_S
from tests.worker import tiny_models
from tests.worker.moe.moe_engines import NEW_TOKENS, PROMPTS, Engine, EngineGroup, answers

pytestmark = pytest.mark.slow


@st.composite
def holdings(draw: Any) -> tuple[list[set[int]], int]:
    """Returns the experts of each rank: an expert may be on no rank, on one, or on several."""
    count = draw(st.integers(1, 7))
    held = st.sets(st.integers(0, count - 1))
    return draw(st.lists(held, min_size=1, max_size=4)), count


def most_kept(have: list[set[int]], count: int) -> int:
    """Returns the maximum number of experts that can stay, found by trying every balanced
    placement."""
    share, extras = divmod(count, len(have))
    best = {(0,) * len(have): 0}
    for expert in range(count):
        after: dict[tuple[int, ...], int] = {}
        for loads, kept in best.items():
            for rank, held in enumerate(have):
                more = (*loads[:rank], loads[rank] + 1, *loads[rank + 1 :])
                over = [load - share for load in more if load > share]
                if len(over) <= extras and all(n == 1 for n in over):
                    after[more] = max(after.get(more, 0), kept + (expert in held))
        best = after
    return max(best.values())


@settings(max_examples=300, deadline=None)
@given(holdings())
@example(([{0, 3}, {1, 2}, {2}], 4))  # the second rank must leave the extra expert to the first
def test_placements_are_balanced_and_move_the_least(case: tuple[list[set[int]], int]) -> None:
    have, count = case
    owners = place_experts(have, count)
    assert owners == place_experts([set(held) for held in have], count)
    loads = [owners.count(rank) for rank in range(len(have))]
    assert len(owners) == count
    assert max(loads) - min(loads) <= 1
    kept = sum(expert in have[owner] for expert, owner in enumerate(owners))
    assert kept == most_kept(have, count)


def test_live_states_survive_regrouping(tiny_moe: Any) -> None:
    """Live states survive regrouping: 1 -> 3 -> 2 -> 1 engines between the steps of one answer;
    experts move where `place_experts` says."""
    folder, truth = tiny_moe("mixtral")
    with EngineGroup(folder) as engine_group:
        first, second, third = (engine_group.add() for _ in range(3))
        rows = [0, 1, 3]
        memberships = [[first], [first, second, third], [first, third], [first]]
        for number, members in enumerate(memberships):
            before = [engine.local_experts()[0] for engine in members]
            done = engine_group.regroup(*members, keep_states=number > 0)
            owners = place_experts(before, 4)
            for rank, (engine, (regrouped,)) in enumerate(zip(members, done, strict=True)):
                share = {e for e, owner in enumerate(owners) if owner == rank}
                assert engine.local_experts() == [share]
                came = share - before[rank]
                had = set().union(*before)
                assert regrouped.experts_moved == len(came & had)
                assert regrouped.experts_loaded == len(came - had)
            if number == 0:
                first.start([PROMPTS[i] for i in rows])
            engine_group.advance()
        while len(first.tokens[0]) < len(PROMPTS[0]) + NEW_TOKENS:
            engine_group.advance()
        got = [tokens[len(PROMPTS[i]) :] for i, tokens in zip(rows, first.tokens, strict=True)]
        assert got == [truth[i] for i in rows]


def test_live_states_of_a_pipeline_survive_new_groups(tiny_moe: Any) -> None:
    """Live states of a pipeline survive new groups: tokens in transit from the last stage to the
    first are received before the groups close."""
    folder, truth = tiny_moe("mixtral")
    with EngineGroup(folder, parallel__pipeline=2) as engine_group:
        first, second = engine_group.add(), engine_group.add()
        engine_group.regroup(first)
        first.start([PROMPTS[1]])
        for step in range(NEW_TOKENS):
            engine_group.advance()
            engine_group.regroup(*([first, second] if step % 2 else [first]), keep_states=True)
        assert first.tokens[0][len(PROMPTS[1]) :] == truth[1]


def test_remaining_engines_continue_after_a_death(tiny_moe: Any) -> None:
    """Remaining engines continue after a death, which breaks the step of all; they load the dead
    engine's experts."""
    folder, truth = tiny_moe("mixtral")
    with EngineGroup(folder) as engine_group:
        engines = [engine_group.add() for _ in range(3)]
        engine_group.regroup(*engines)
        assert answers(engine_group, [[0], [1], [2]]) == truth[:3]
        lost = engines[2].local_experts()[0]
        engines[2].shutdown()
        engine_group.engines.remove(engines[2])
        for engine in engines[:2]:
            engine.start([PROMPTS[0]])
        started = [engine.submit(100) for engine in engines[:2]]
        for futures in started:
            error = futures[0].exception(timeout=HANG_S)
            assert type(error).__name__ == "GroupError", error
        done = engine_group.regroup(*engines[:2])
        assert sum(answer.experts_loaded for (answer,) in done) == len(lost) > 0
        assert set().union(*(engine.local_experts()[0] for engine in engines[:2])) == set(range(4))
        assert answers(engine_group, [[3], [4, 5]]) == truth[3:]


def broken(futures: list[Any]) -> None:
    """Asserts that the calls fail soon with GroupError."""
    wait(futures, timeout=HANG_S)
    assert all(isinstance(future.exception(timeout=0), GroupError) for future in futures)


def test_an_abort_wakes_workers_that_wait_for_a_peer(tiny_moe: Any) -> None:
    """An abort wakes workers that wait for a peer, in a regrouping that no peer joins and in a step
    that no peer computes."""
    folder, truth = tiny_moe("mixtral")
    with EngineGroup(folder) as engine_group:
        first, second = engine_group.add(), engine_group.add()
        waiting = first.regroup(GroupPlan(0, None, 1, 2, 0, first.store))
        while wait(waiting, timeout=0.05).not_done:
            first.workers[0].abort(first.generation)
        broken(waiting)
        engine_group.epoch = 1
        engine_group.regroup(first, second)
        first.start([PROMPTS[0]])
        waiting = first.submit(1)
        first.workers[0].abort(first.generation - 1)
        assert wait(waiting, timeout=0.2).not_done, "the groups are of a later plan"
        first.workers[0].abort(first.generation)
        broken(waiting)
        broken(second.submit(1))
        engine_group.regroup(first, second)
        assert answers(engine_group, [[0], [1]]) == truth[:2]


def test_a_worker_that_cannot_read_its_experts_reports_the_error(
    tiny_moe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that cannot read its experts reports the failure; its peer detects it in the next
    operation; both recover with the next plan."""
    folder, truth = tiny_moe("mixtral")
    real = experts.load_experts

    def fails(wanted: Any, *arguments: Any) -> None:
        if 3 in wanted:
            raise ValueError("cannot be read")
        real(wanted, *arguments)

    with EngineGroup(folder) as engine_group:
        first, second = engine_group.add(), engine_group.add()
        with monkeypatch.context() as patch:
            patch.setattr(experts, "load_experts", fails)
            (one,), (two,) = engine_group.submit_regroup(first, second)
            wait([one, two], timeout=HANG_S)
        assert isinstance(two.exception(timeout=0), ValueError)
        assert one.exception(timeout=0) is None or isinstance(one.exception(), GroupError)
        first.start([PROMPTS[0]])
        broken(first.submit(1))
        engine_group.regroup(first, second)
        assert first.local_experts()[0] | second.local_experts()[0] == set(range(4))
        assert answers(engine_group, [[0], [1]]) == truth[:2]


def test_loading_missing_experts_can_be_aborted_for_a_newer_group(
    tiny_moe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that loads experts for itself can be aborted for a newer group. It keeps the
    experts that it had, and has all or none of each."""
    folder, truth = tiny_moe("mixtral")
    real = experts.load_experts
    with EngineGroup(folder) as engine_group:
        first, second = engine_group.add(), engine_group.add()
        engine_group.regroup(first, second)
        [had] = first.local_experts()

        def is_aborted(*arguments: Any) -> None:
            first.workers[0].abort(first.generation)
            real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(experts, "load_experts", is_aborted)
            broken(first.regroup(GroupPlan(0, None, engine_group.epoch)))
        assert first.local_experts() == [had] and 0 < len(had) < 4
        [moved] = engine_group.regroup(first, second)[0]
        assert (moved.experts_moved, moved.experts_loaded) == (0, 0)
        assert answers(engine_group, [[0], [1]]) == truth[:2]


def test_dummy_experts_are_equal_on_every_engine(tmp_path: Path) -> None:
    tiny_models.make(tmp_path, "qwen3_moe")
    (tmp_path / "model.safetensors").unlink()

    def weights(engine: Engine) -> dict[tuple[int, int], torch.Tensor]:
        return {
            (layer, expert): torch.cat(
                [
                    (part.unpack() if isinstance(part, PackedTensor) else part).flatten()
                    for part in parts
                ]
            )
            for layer, module in enumerate(engine.workers[0].model.moe_layers())
            for expert, parts in module.local_experts.items()
        }

    with EngineGroup(tmp_path, model__load_format="dummy") as engine_group:
        alone, one, two = (engine_group.add() for _ in range(3))
        engine_group.regroup(alone)
        engine_group.regroup(one, two)
        whole, halves = weights(alone), [weights(one), weights(two)]
        assert [len(half) for half in halves] == [8, 8]
        assert len({tuple(part.tolist()) for part in whole.values()}) == 16
        for half in halves:
            assert all(torch.equal(part, whole[key]) for key, part in half.items())


@pytest.mark.parametrize(("tensor", "least", "share"), [(1, 1, 4), (1, 3, 2), (2, 1, 2), (2, 3, 1)])
def test_room_is_left_for_the_largest_share(
    tiny_moe: Any, monkeypatch: pytest.MonkeyPatch, tensor: int, least: int, share: int
) -> None:
    """The cache leaves memory for the largest share of experts, ceil(4 / ranks) in each layer,
    because they arrive after the cache was sized."""
    folder, _truth = tiny_moe("mixtral")
    expert_bytes = 3 * 128 * 192 * 4
    # K and V, layers, tokens, size, heads, bytes of a float
    block_bytes = 2 * 4 * 4 * 32 * (2 // tensor) * 4
    free = 4 * share * expert_bytes + 3 * block_bytes
    monkeypatch.setattr(kv_cache, "free_bytes", lambda *_: free)
    settings = {
        "parallel__data": 3,
        "parallel__tensor": tensor,
        "cluster__min_engines": least,
        "cache__memory_fraction": 1.0,
    }
    with EngineGroup(folder, **settings) as engine_group:
        assert engine_group.add().limits[0].num_blocks == 3
