"""Mixture-of-experts models against transformers, for any number of engines that share the
experts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from swell.configs.schema import ModelConfig, ParallelConfig
from swell.worker.comm.mesh import Mesh
from swell.worker.hf_config import load_config
from swell.worker.layers.moe import ExpertTraits, MoE
from swell.worker.layers.weight_shard import materialize
from swell.worker.models import build_model
from swell.worker.wire import GroupPlan
from tests.support.deadlines import HANG_S
from tests.worker import tiny_models
from tests.worker.comm.test_mesh import in_threads
from tests.worker.moe.moe_engines import NEW_TOKENS, PROMPTS, EngineGroup, answers

pytestmark = pytest.mark.slow

FAMILIES = ["mixtral", "qwen3_moe", "qwen3_moe-mixed"]

SPREADS = {1: [[0, 1, 3]], 2: [[0, 1], [2, 3, 4]], 3: [[0, 1, 2], [], [3]]}
"""Number of engines -> the prompts of each: uneven, and one of three engines is idle."""


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("engines", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_engines_answer_like_transformers(
    tiny_moe: Any, family: str, engines: int, tensor: int
) -> None:
    folder, truth = tiny_moe(family)
    with EngineGroup(folder, parallel__tensor=tensor) as engine_group:
        engine_group.regroup(*[engine_group.add() for _ in range(engines)])
        rows = SPREADS[engines]
        assert answers(engine_group, rows) == [truth[i] for mine in rows for i in mine]


@pytest.mark.parametrize(("engines", "tensor"), [(1, 2), (2, 1)])
def test_pipelines_of_engines(tiny_moe: Any, engines: int, tensor: int) -> None:
    folder, truth = tiny_moe("mixtral")
    with EngineGroup(folder, parallel__tensor=tensor, parallel__pipeline=2) as engine_group:
        engine_group.regroup(*[engine_group.add() for _ in range(engines)])
        rows = SPREADS[engines]
        assert answers(engine_group, rows) == [truth[i] for mine in rows for i in mine]


def hidden_states(engine_group: EngineGroup, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Returns the outputs of the first member's model, one for each step."""
    engine_group.members[0].hidden.clear()
    answers(engine_group, rows)
    return list(engine_group.members[0].hidden)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_bits_do_not_depend_on_the_engines(tiny_moe: Any, family: str, tensor: int) -> None:
    """The bits do not depend on the engines: by itself, with two busy engines, with two idle ones,
    and with the experts elsewhere. And the bits of a row do not depend on the other rows."""
    folder, _truth = tiny_moe(family)
    with EngineGroup(folder, parallel__tensor=tensor) as engine_group:
        first, second, third = (engine_group.add() for _ in range(3))
        engine_group.regroup(first)
        alone = hidden_states(engine_group, [[0, 1, 3]])
        assert len(alone) == NEW_TOKENS
        singly = [hidden_states(engine_group, [[row]]) for row in (0, 1, 3)]
        for together, *apart in zip(alone, *singly, strict=True):
            assert torch.equal(together, torch.cat(apart))
        engine_group.regroup(first, second, third)
        spread = first.local_experts()
        beside = [
            hidden_states(engine_group, [[0, 1, 3], [2, 4, 5], [1]]),
            hidden_states(engine_group, [[0, 1, 3], [], []]),
        ]
        for worker in first.workers:
            for layer in worker.model.moe_layers():
                layer.local_experts.clear()
        engine_group.regroup(third, first)
        assert first.local_experts() != spread
        engine_group.members.reverse()
        beside.append(hidden_states(engine_group, [[0, 1, 3], [5]]))
        for states in beside:
            assert all(torch.equal(a, b) for a, b in zip(states, alone, strict=True))


def test_dp_sync_counts_work_and_pause_votes(tiny_moe: Any) -> None:
    with EngineGroup(tiny_moe("mixtral")[0], parallel__pipeline=2) as engine_group:
        engines = [engine_group.add() for _ in range(3)]
        engine_group.regroup(*engines)
        engines[1].start([PROMPTS[0]])
        steps = [
            # (work, pause) of each engine -> (working, pausing) counts over all engines
            ([(False, False), (True, False), (True, True)], (2, 1)),
            ([(False, True), (False, True), (False, True)], (0, 3)),
        ]
        for step, (submissions, reduced) in enumerate(steps):
            started = [
                e.submit(step, *submission)
                for e, submission in zip(engines, submissions, strict=True)
            ]
            results = [e.finish(f) for e, f in zip(engines, started, strict=True)]
            assert [(out.working, out.pausing) for out in results] == [reduced] * 3
            assert all(out.sync_s >= 0 for out in results)
        engine_group.regroup(engines[0])
        alone = engines[0].finish(engines[0].submit(9, True, True))
        assert (alone.working, alone.pausing) == (1, 1)


def test_progress_counter_counts_layers_and_stops_when_idle(tiny_moe: Any) -> None:
    with EngineGroup(tiny_moe("mixtral")[0]) as engine_group:
        busy, idle = engine_group.add(), engine_group.add()
        engine_group.regroup(busy, idle)
        engine_group.advance()
        before = [engine.workers[0].progress_counter for engine in (busy, idle)]
        assert all(count > 0 for count in before), "experts were loaded"
        busy.start([PROMPTS[0]])
        engine_group.advance()
        # Each of four layers has attention and experts; the idle engine computes experts only.
        after = [engine.workers[0].progress_counter for engine in (busy, idle)]
        assert [one - other for one, other in zip(after, before, strict=True)] == [8, 4]


def test_choices_keep_their_type_next_to_small_types() -> None:
    """Expert indices are sent exactly with 16-bit types: there are 300 experts, and bfloat16
    represents integers exactly only up to 256."""
    traits = ExpertTraits(300, 4, 2, True, False, ("gate", "up", "down"))
    store = torch.distributed.HashStore()
    torch.manual_seed(0)
    router = torch.randn(300, 8).bfloat16()
    weights = [(torch.randn(8, 8).bfloat16(), torch.randn(8, 4).bfloat16()) for _ in range(300)]
    inputs = [torch.randn(9, 8).bfloat16(), torch.randn(4, 8).bfloat16()]

    def compute(mesh: Mesh, rank: int, held: range) -> torch.Tensor:
        layer = MoE(8, traits, mesh)
        materialize(layer, torch.device("cpu"), torch.bfloat16)
        layer.router.weight.copy_(router)
        layer.local_experts.update({expert: weights[expert] for expert in held})
        return layer(inputs[rank])

    def work(rank: int) -> torch.Tensor:
        mesh = Mesh.build(ParallelConfig(expert=True), 0)
        mesh.begin(1)
        mesh.regroup(GroupPlan(1, None, 1, 2, rank), None, store, timeout_s=HANG_S)
        mesh.tokens = [len(x) for x in inputs]
        out = compute(mesh, rank, range(rank, 300, 2))
        mesh.close()
        return out

    for rank, out in enumerate(in_threads(2, work)):
        alone = compute(Mesh.build(ParallelConfig(), 0), rank, range(300))
        assert alone.float().abs().max() > 1
        assert torch.equal(out, alone)


def test_choices_are_counted_in_the_same_memory() -> None:
    """Captured steps contain its address."""
    traits = ExpertTraits(4, 8, 2, True, False, ("gate", "up", "down"))
    layer = MoE(8, traits, Mesh.build(ParallelConfig(), 0))
    layer.count_load()
    assert layer.load is not None
    address = layer.load.data_ptr()
    layer.load += 1
    layer.count_load()
    assert layer.load.data_ptr() == address and not layer.load.any()


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    tiny_models.make(tmp_path, "llama")
    config = ModelConfig(path=str(tmp_path))
    mesh = Mesh.build(ParallelConfig(expert=True), 0)
    with pytest.raises(ValueError, match=r"parallel.expert=true.*LlamaForCausalLM.*no experts"):
        build_model(config, load_config(config), mesh, "cpu", torch.float32)
