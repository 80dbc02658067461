"""Load balancing of experts: frequently chosen experts get copies, and others move, while engines
serve. The load evens out, and no bit of an answer changes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from swell.configs.schema import load
from swell.worker.comm.groups import GroupError
from swell.worker.moe import experts
from swell.worker.moe.expert_placement import ExpertPlacement, balance, imbalance
from swell.worker.moe.experts import place_experts
from swell.worker.sharded import saving
from tests.support.deadlines import HANG_S
from tests.worker.moe.moe_engines import NEW_TOKENS, PROMPTS, Engine, EngineGroup, answers

# ---------------------------------------------------------------- the placement


@st.composite
def cases(draw: Any) -> tuple[list[list[int]], list[set[int]], int, int]:
    experts, ranks = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    engines = draw(st.integers(1, ranks))
    counts = st.lists(st.integers(0, 1000), min_size=experts, max_size=experts)
    load = draw(st.lists(counts, min_size=engines, max_size=engines))
    held = st.sets(st.integers(0, experts - 1))
    have = draw(st.lists(held, min_size=ranks, max_size=ranks))
    return load, have, experts, draw(st.integers(0, 8))


@settings(max_examples=500, deadline=None)
@given(cases())
def test_every_placement_fits_and_computes_each_choice_once(case: Any) -> None:
    load, have, experts, redundant = case
    placement = balance(load, have, experts, redundant)
    assert placement == balance(load, [set(held) for held in have], experts, redundant)
    room = -(-(experts + redundant) // len(have))
    for rank in range(len(have)):
        assert sum(rank in holders for holders in placement.holders) <= room
    for expert, holders in enumerate(placement.holders):
        assert holders and list(holders) == sorted(set(holders))
        assert {owners[expert] for owners in placement.owners} == set(holders)
    assert sum(len(holders) for holders in placement.holders) <= experts + redundant
    assert sum(placement.rank_loads(load, len(have))) == sum(map(sum, load))


def skewed(engines: int, experts: int, power: float, seed: int) -> list[list[int]]:
    """Returns loads by Zipf's law: different for each engine, but with the same favourite
    experts."""
    draw = random.Random(seed)
    weights = [(rank + 1.0) ** -power for rank in range(experts)]
    draw.shuffle(weights)
    return [[int(20_000 * w * draw.uniform(0.8, 1.2)) for w in weights] for _ in range(engines)]


@pytest.mark.parametrize("power", [0.5, 1.0, 1.5])
@pytest.mark.parametrize(
    ("engines", "ranks", "experts", "redundant"),
    [(2, 2, 8, 2), (4, 4, 16, 4), (4, 8, 64, 8), (8, 8, 128, 16), (6, 6, 32, 6)],
)
def test_a_skewed_load_evens_out(
    engines: int, ranks: int, experts: int, redundant: int, power: float
) -> None:
    for seed in range(10):
        load = skewed(engines, experts, power, seed)
        owners = place_experts([set()] * ranks, experts)
        have = [{e for e, owner in enumerate(owners) if owner == rank} for rank in range(ranks)]
        holders = tuple((owner,) for owner in owners)
        before = ExpertPlacement(holders, (tuple(owners),) * engines)
        after = balance(load, have, experts, redundant)
        found = imbalance(after.rank_loads(load, ranks))
        assert found < 1.2
        assert found <= imbalance(before.rank_loads(load, ranks)) + 0.05


# ---------------------------------------------------------------- the move


def spread(engine_group: EngineGroup) -> list[list[set[int]]]:
    """Returns [workers][layers of the stage]: the experts that each worker holds."""
    workers = [worker for engine in engine_group.members for worker in engine.workers]
    return [[set(layer.local_experts) for layer in worker.model.moe_layers()] for worker in workers]


def num_copies(engine_group: EngineGroup) -> int:
    return sum(len(held) for of_worker in spread(engine_group) for held in of_worker)


def uneven(engine_group: EngineGroup) -> float:
    """Returns the largest imbalance of a layer, by the counts of each engine's first worker."""
    workers = [worker for engine in engine_group.members for worker in engine.workers]
    found = []
    for at, layer in enumerate(workers[0].model.moe_layers()):
        held = [set(worker.model.moe_layers()[at].local_experts) for worker in workers]
        loads = [0] * len(workers)
        for number, engine in enumerate(engine_group.members):
            counted = engine.workers[0].model.moe_layers()[at].load.tolist()
            for expert, count in enumerate(counted):
                ranks = [rank for rank, of_rank in enumerate(held) if expert in of_rank]
                loads[layer.owners[number][expert] if layer.owners else ranks[0]] += count
        found.append(imbalance(loads))
    return max(found)


def skewed_model(folder: Path, target: Path) -> Path:
    """Makes a copy of a model whose routers choose a few experts most often."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    weights = load_file(str(target / "model.safetensors"))
    for name, tensor in weights.items():
        if name.endswith("gate.weight"):
            scale = torch.ones(len(tensor), 1)
            scale[:2] = 6.0  # larger logits, positive or negative: chosen often, or never
            weights[name] = tensor * scale
    save_file(weights, str(target / "model.safetensors"), metadata={"format": "pt"})
    return target


def outputs(engine_group: EngineGroup, rows: list[list[int]], rounds: int) -> list[Any]:
    """Returns the tokens and hidden states of all members in each round."""
    found: list[Any] = []
    for _ in range(rounds):
        for engine in engine_group.members:
            engine.hidden.clear()
        found.append(answers(engine_group, rows))
        found += [list(engine.hidden) for engine in engine_group.members]
    return found


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


WAYS: dict[str, dict[str, Any]] = {
    "one worker each": {},
    "tensor 2": {"parallel__tensor": 2},
    "pipeline 2": {"parallel__pipeline": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe-mixed"])
def test_no_bit_changes_while_experts_move(
    tiny_moe: Any, family: str, way: str, tmp_path: Path
) -> None:
    folder = skewed_model(tiny_moe(family)[0], tmp_path / "model")
    rows, found, moved = [[0, 1], [2, 3, 4], [5]], [], False
    for options in ({}, {"parallel__balance_steps": 4, "parallel__redundant_experts": 2}):
        with EngineGroup(folder, **WAYS[way], **options) as engine_group:
            engine_group.regroup(*[engine_group.add() for _ in rows])
            before = spread(engine_group)
            found.append(outputs(engine_group, rows, 4))
            moved = spread(engine_group) != before
    assert moved and equal(*found)


@pytest.mark.slow
def test_equally_loaded_experts_stay(tiny_moe: Any) -> None:
    """Experts that are chosen equally often stay: below the limit nothing moves."""
    folder, _ = tiny_moe("mixtral")
    with EngineGroup(folder, parallel__balance_steps=3) as engine_group:
        engine_group.regroup(*[engine_group.add() for _ in range(2)])
        before = spread(engine_group)
        for worker in [worker for engine in engine_group.members for worker in engine.workers]:
            layers = worker.model.moe_layers()
            worker.runner.dp_sync._balancer.before_step()
            for layer in layers:
                layer.load += 1000  # much more than what the answers add
        answers(engine_group, [[0], [1]])
        assert spread(engine_group) == before


@pytest.mark.slow
def test_the_load_of_a_skewed_model_evens_out(tiny_moe: Any, tmp_path: Path) -> None:
    folder = skewed_model(tiny_moe("qwen3_moe")[0], tmp_path / "model")
    options = {"parallel__balance_steps": 2 * NEW_TOKENS, "parallel__redundant_experts": 8}
    with EngineGroup(folder, **options) as engine_group:
        engine_group.regroup(*[engine_group.add() for _ in range(2)])
        rows = [[0, 1, 3], [1, 3, 4]]
        answers(engine_group, rows)
        assert uneven(engine_group) > 1.2
        for _ in range(4):
            answers(engine_group, rows)
        assert uneven(engine_group) < 1.2


@pytest.mark.slow
def test_copies_disappear_and_return_with_engines(tiny_moe: Any, tmp_path: Path) -> None:
    """Copies are dropped and made again when engines leave and join. A rescale places experts from
    any copy; a dead engine takes some copies with it."""
    folder = skewed_model(tiny_moe("mixtral")[0], tmp_path / "model")
    with EngineGroup(folder) as plain:
        plain.regroup(plain.add())
        truth = [answers(plain, [[i]])[0] for i in range(len(PROMPTS))]
    options = {"parallel__balance_steps": 3, "parallel__redundant_experts": 3}
    with EngineGroup(folder, **options) as engine_group:
        engines: list[Engine] = [engine_group.add() for _ in range(3)]
        for members in (engines, engines[:2], engines, engines[1:], engines[:1], engines):
            engine_group.regroup(*members)
            layers = len(spread(engine_group)[0])
            assert num_copies(engine_group) == 4 * layers, "each expert has one copy"
            rows = [[0, 1], [2], [3, 4]][: len(members)]
            for _ in range(2):
                assert answers(engine_group, rows) == [truth[i] for mine in rows for i in mine]
        assert num_copies(engine_group) > 4 * layers
        engines[2].shutdown()
        engine_group.engines.remove(engines[2])
        engine_group.regroup(*engines[:2])
        rows = [[0, 1], [2]]
        for _ in range(2):
            assert answers(engine_group, rows) == [truth[i] for mine in rows for i in mine]


@pytest.mark.slow
def test_an_engine_that_dies_while_experts_move_breaks_the_step(
    tiny_moe: Any, tmp_path: Path
) -> None:
    folder = skewed_model(tiny_moe("mixtral")[0], tmp_path / "model")
    with EngineGroup(folder) as plain:
        plain.regroup(plain.add())
        truth = [answers(plain, [[i]])[0] for i in (0, 1)]
    options = {"parallel__balance_steps": 3, "parallel__redundant_experts": 4}
    with EngineGroup(folder, **options) as engine_group:
        engines = [engine_group.add() for _ in range(3)]
        engine_group.regroup(*engines)
        for engine in engines:
            engine.start([PROMPTS[0]])
        for _ in range(2):
            engine_group.advance()
        # the third engine does not take part
        started = [engine.submit(100) for engine in engines[:2]]
        engines[2].shutdown()
        engine_group.engines.remove(engines[2])
        for futures in started:
            assert type(futures[0].exception(timeout=HANG_S)).__name__ == "GroupError"
        engine_group.regroup(*engines[:2])
        for _ in range(3):
            assert answers(engine_group, [[0], [1]]) == truth


@pytest.mark.slow
def test_a_half_moved_layer_is_placed_again(
    tiny_moe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that is half moved is placed again. A worker fails between two moves of the layer:
    none has arrived, and nothing is lost."""
    folder = skewed_model(tiny_moe("mixtral")[0], tmp_path / "model")
    options = {"parallel__balance_steps": 3, "parallel__redundant_experts": 4}
    with EngineGroup(folder) as plain:
        plain.regroup(plain.add())
        truth = [answers(plain, [[i]])[0] for i in (0, 1)]
    with EngineGroup(folder, **options) as engine_group:
        engines = [engine_group.add() for _ in range(2)]
        engine_group.regroup(*engines)

        def half(layer: Any, mesh: Any, expert: int, source: int, target: int) -> Any:
            arrived = real(layer, mesh, expert, source, target)
            moves.append(expert)
            if mesh.expert.rank == 1:
                mesh.abort()
                raise GroupError("it fell")
            return arrived

        real, moves = experts._move, []
        monkeypatch.setattr(experts, "_move", half)
        for engine in engines:
            engine.start([PROMPTS[0]])
        for _ in range(3):
            engine_group.advance()
        for futures in [engine.submit(100) for engine in engines]:
            assert type(futures[0].exception(timeout=HANG_S)).__name__ == "GroupError"
        assert moves
        monkeypatch.undo()
        held = [held for of_worker in spread(engine_group) for held in of_worker]
        assert sum(map(len, held)) == 4 * len(spread(engine_group)[0]), "none came, none was lost"
        engine_group.regroup(*engines)
        for _ in range(3):
            assert answers(engine_group, [[0], [1]]) == truth


@pytest.mark.slow
def test_a_death_after_moves_with_saved_weights(tiny_moe: Any, tmp_path: Path) -> None:
    """After moves, a death may lose an expert in some layers only; its saved file has all
    layers."""
    source = str(skewed_model(tiny_moe("mixtral")[0], tmp_path / "model"))
    keys = {"model.device": "cpu", "model.dtype": "float32", "parallel.expert": True}
    saving.save_sharded(load(source, keys), tmp_path / "saved", lambda what, done, total: None)
    options = {"parallel__balance_steps": 3, "parallel__redundant_experts": 2}
    with EngineGroup(tmp_path / "saved", **options) as engine_group:
        engines = [engine_group.add() for _ in range(3)]
        engine_group.regroup(*engines)
        rows = [[0, 1], [2], [3, 4]]
        truth = answers(engine_group, rows)
        assert answers(engine_group, rows) == truth
        lost = spread(engine_group)[2]
        assert any(held != lost[0] for held in lost), "another placement in each layer"
        engines[2].shutdown()
        engine_group.engines.remove(engines[2])
        engine_group.regroup(*engines[:2])
        assert answers(engine_group, [[0, 1], [2]]) == truth[:3]
