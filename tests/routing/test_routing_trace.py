"""The router against other policies, on simulated conversations and a simulated clock."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from swell.engine.kv.block_hash import extend_block_hashes, pack_tokens
from tests.routing.policies import POLICIES
from tests.routing.simulation import BLOCK_TOKENS, Simulation, SimulationConfig, SimulationResult
from tests.routing.trace import TraceConfig, generate

pytestmark = pytest.mark.slow

SHAPE = TraceConfig(users_per_s=3.0, duration_s=40.0)
TRACE = generate(SHAPE, 1, BLOCK_TOKENS)
TURNS = sum(len(conversation.turns) for conversation in TRACE)


@cache
def run(name: str, **options: object) -> SimulationResult:
    return Simulation(TRACE, POLICIES[name], **options).run()  # type: ignore[arg-type]


# -------------------------------------------------------------------------------- the trace


def test_a_seed_determines_the_trace() -> None:
    assert generate(SHAPE, 1, BLOCK_TOKENS) == TRACE != generate(SHAPE, 2, BLOCK_TOKENS)


def test_conversations_have_the_configured_shape() -> None:
    starts = [conversation.start_s for conversation in TRACE]
    assert starts == sorted(starts) and starts[0] > 0 and starts[-1] < SHAPE.duration_s
    assert 76 <= len(TRACE) <= 164, "120 are expected, and sqrt(120) is 11"
    systems = {tuple(c.token_ids[: SHAPE.system_tokens]) for c in TRACE}
    assert len(systems) == SHAPE.system_prompts
    for conversation in TRACE:
        end = SHAPE.system_tokens
        for turn in conversation.turns:
            assert turn.prompt_tokens > end and turn.answer_tokens >= 1 and turn.think_s >= 0
            end = turn.prompt_tokens + turn.answer_tokens
        assert end == len(conversation.token_ids)
        names: list[bytes] = []
        extend_block_hashes(names, pack_tokens(conversation.token_ids), BLOCK_TOKENS)
        assert names == list(conversation.block_hashes)


# -------------------------------------------------------------------------------- the simulation


def test_an_unlimited_cache_hits_all_except_the_last_tokens() -> None:
    """With one engine and an unlimited cache, a block is computed only once."""
    outcome = run("round_robin", sizes=((0.0, 1),), config=SimulationConfig(num_blocks=10**6))
    names = {
        name for c in TRACE for name in c.block_hashes[: c.turns[-1].prompt_tokens // BLOCK_TOKENS]
    }
    missed = outcome.prompt_tokens - outcome.hit_tokens
    assert len(outcome.ttft_s) == TURNS
    # Answers are not computed as prompts; the rest of a block and the last block may be computed
    # again.
    answers = sum(turn.answer_tokens for c in TRACE for turn in c.turns[:-1])
    assert missed <= len(names) * BLOCK_TOKENS - answers + TURNS * 2 * BLOCK_TOKENS
    assert outcome.moved == 0


def test_a_run_is_the_same_every_time() -> None:
    assert run("affinity", ingresses=2) == run.__wrapped__("affinity", ingresses=2)


@pytest.mark.parametrize("num_blocks", [1500, 8192])
def test_every_turn_is_served_and_all_counts_return_to_zero(num_blocks: int) -> None:
    simulation: Any = Simulation(
        TRACE,
        POLICIES["affinity"],
        ingresses=2,
        sizes=((0.0, 4), (15.0, 6), (30.0, 3)),
        config=SimulationConfig(num_blocks=num_blocks),
    )
    outcome = simulation.run()
    assert len(outcome.ttft_s) == TURNS and min(outcome.ttft_s) > 0
    for engine in simulation._engines.values():
        assert engine.is_idle and engine._free_blocks == num_blocks
    for router in simulation._ingresses:
        for engine in router._engines.values():
            loads = [engine.sent, *engine.unreported.values()]
            assert all((x.uncomputed_tokens, x.requests, x.blocks) == (0, 0, 0) for x in loads)


# -------------------------------------------------------------------------------- the policies


@pytest.mark.parametrize("ingresses", [1, 2, 3])
@pytest.mark.parametrize("other", ["least_loaded", "round_robin"])
def test_affinity_raises_hits_and_lowers_latency(ingresses: int, other: str) -> None:
    ours, theirs = run("affinity", ingresses=ingresses), run(other, ingresses=ingresses)
    missed, others_missed = 1 - ours.hit_rate, 1 - theirs.hit_rate
    assert missed < others_missed * (0.3 if ingresses == 1 else 0.75)
    assert ours.mean_ttft_s < theirs.mean_ttft_s
    assert ours.ttft_quantile_s(50) < theirs.ttft_quantile_s(50)
    assert ours.ttft_quantile_s(99) < theirs.ttft_quantile_s(99)


def test_conversations_stay_on_their_engine() -> None:
    assert run("affinity").moved_rate < 0.05


def test_a_rescale_moves_only_conversations_whose_engine_left() -> None:
    """A rescale moves only conversations whose engine left. New engines get new conversations; no
    conversation moves away from an engine that stays."""
    still = run("affinity")
    grown = run("affinity", sizes=((0.0, 4), (15.0, 6)))
    both = run("affinity", sizes=((0.0, 4), (15.0, 6), (30.0, 3)))
    for outcome in (grown, both):
        assert outcome.moved <= still.moved + 0.05 * outcome.followups
        assert outcome.hit_rate > still.hit_rate - 0.05
    assert min(grown.busy_s[rank] for rank in (4, 5)) > 0, "and new engines have work"
