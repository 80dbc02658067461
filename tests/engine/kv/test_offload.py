"""Blocks that are offloaded from the device come back with their content, with any tiers and
schedule."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.engine.core import EngineCore
from swell.engine.kv.offload_tiers import OffloadTiers
from swell.engine.wire import EngineCoreRequest
from swell.worker.sampler_wire import SamplerParams
from swell.worker.wire import BlockCopy
from tests.engine.conservation import check_blocks
from tests.engine.executor.fake_worker import expected, make_core, regroup, run, token_ids

CLIENT = b"c"


def request(name: str, prompt: list[int], outputs: int = 2) -> EngineCoreRequest:
    return EngineCoreRequest(name, prompt, SamplerParams(seed=3), outputs)


def answer(core: EngineCore, wanted: EngineCoreRequest) -> int:
    """Runs a request and checks its answer; returns the number of cached prompt tokens."""
    assert core.add_request(wanted, CLIENT) is None
    outputs = run(core)[wanted.request_id]
    assert token_ids(outputs) == expected(wanted)
    check_blocks(core.scheduler.kv.pool)
    return outputs[0].num_cached_tokens


def prompt(first: int, blocks: int = 4) -> list[int]:
    return [(first + i) % 50 for i in range(4 * blocks + 1)]


@pytest.mark.parametrize("offload", [(40, 0), (0, 40), (4, 40)])
@pytest.mark.parametrize("depth", [1, 3])
def test_an_offloaded_prefix_returns_to_the_device(offload: tuple[int, int], depth: int) -> None:
    core = make_core(num_blocks=7, max_model_len=28, steps_in_flight=depth, offload_blocks=offload)
    tiers = core.scheduler.kv.offload
    for first in range(6):
        assert answer(core, request(f"a{first}", prompt(first * 7))) == 0
    assert tiers.num_loaded == 0 < tiers.num_saved
    for first in range(5):
        assert answer(core, request(f"b{first}", prompt(first * 7))) == 16
    assert tiers.num_loaded >= 4 * 4
    saved = tiers.num_saved
    for first in range(5):
        assert answer(core, request(f"c{first}", prompt(first * 7))) == 16
    assert tiers.num_saved == saved, "what is in a tier is not saved again"


def test_without_tiers_nothing_is_copied() -> None:
    core = make_core(num_blocks=7, max_model_len=28)
    for first in (0, 7, 14, 0):
        assert answer(core, request(f"{first} {core.num_steps}", prompt(first))) == 0
    assert all(not plan.copies for plan in core.executor.plans)  # type: ignore[attr-defined]


def test_a_preempted_request_finds_its_blocks_again() -> None:
    core = make_core(num_blocks=10, max_model_len=40, offload_blocks=(60, 0), steps_in_flight=2)
    wanted = [request(f"r{i}", prompt(9 * i, 2), 20) for i in range(4)]
    for one in wanted:
        core.add_request(one, CLIENT)
    outputs = run(core)
    assert [token_ids(outputs[one.request_id]) for one in wanted] == list(map(expected, wanted))
    assert core.scheduler.num_preemptions and core.scheduler.kv.offload.num_loaded


def test_blocks_in_tiers_are_lost_with_the_workers() -> None:
    core = make_core(num_blocks=7, max_model_len=28, offload_blocks=(40, 0))
    for first in (0, 7, 14):
        answer(core, request(f"a{first}", prompt(first)))
    regroup(core)
    assert answer(core, request("b", prompt(0))) == 0
    assert not core.scheduler.kv.offload.num_loaded


def test_invalid_blocks_are_forgotten() -> None:
    tiers = OffloadTiers((2, 2))
    tiers.save(0, b"a")
    tiers.forget([b"a", b"b"])
    assert not tiers.has(b"a")
    for name in (b"b", b"c", b"d", b"e"):
        tiers.save(0, name)
    assert all(map(tiers.has, (b"b", b"c", b"d", b"e"))), "the place is free again"


def test_the_least_recently_used_block_moves_to_the_next_tier_and_is_then_evicted() -> None:
    tiers = OffloadTiers((1, 1))
    tiers.save(5, b"a")
    tiers.save(6, b"b")
    assert tiers.take_copies() == [
        BlockCopy(0, 5, 1, 0),
        BlockCopy(1, 0, 2, 0),
        BlockCopy(0, 6, 1, 0),
    ]
    tiers.save(7, b"c")
    assert not tiers.has(b"a") and tiers.has(b"b") and tiers.has(b"c")


def test_pinned_blocks_stay() -> None:
    tiers = OffloadTiers((2,))
    tiers.save(0, b"a")
    tiers.save(1, b"b")
    tiers.pin([b"a", b"b"])
    tiers.save(2, b"c")
    assert not tiers.has(b"c") and tiers.num_saved == 2
    tiers.load(b"a", 3)
    tiers.unpin()
    tiers.save(2, b"c")
    assert tiers.has(b"c") and not tiers.has(b"a")
    assert tiers.take_copies()[-2:] == [BlockCopy(1, 0, 0, 3), BlockCopy(0, 2, 1, 0)]


@settings(max_examples=200, deadline=None)
@given(
    prompts=st.lists(
        st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=6), min_size=4, max_size=24
    ),
    num_blocks=st.integers(9, 12),
    offload=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    depth=st.integers(1, 3),
    rows=st.integers(1, 4),
    losses=st.sets(st.integers(0, 60), max_size=2),
)
def test_answers_are_correct_under_memory_pressure(
    prompts, num_blocks, offload, depth, rows, losses
) -> None:
    """Answers stay right under pressure: few prefixes that occur repeatedly, and hardly any free
    blocks."""
    core = make_core(
        num_blocks=num_blocks,
        max_model_len=36,
        steps_in_flight=depth,
        max_rows=rows,
        offload_blocks=offload,
    )
    wanted = [
        request(f"r{i}", [token for kind in kinds for token in (kind, 7, kind, 9)] + [i % 3], 3)
        for i, kinds in enumerate(prompts)
    ]
    outputs: dict[str, list[int]] = {}
    clock = 0
    while core.has_work or clock < len(wanted):
        if clock < len(wanted):
            core.add_request(wanted[clock], CLIENT)
        if clock in losses:
            regroup(core)
        for answers in core.step().values():
            for one in answers:
                outputs.setdefault(one.request_id, []).extend(one.new_token_ids)
        clock += 1
        assert clock < 5000
    assert outputs == {one.request_id: expected(one) for one in wanted}
    core.check_idle()
    check_blocks(core.scheduler.kv.pool)
