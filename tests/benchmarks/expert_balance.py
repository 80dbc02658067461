"""`python -m tests.benchmarks.expert_balance`: the time of a layer with experts over two engines
whose tokens mostly choose a few experts, before and after the experts are balanced.

The engines are threads of one process, with one core each, and a layer of random weights. Both
states are measured in turn, step by step, so that other load affects both. The median of the ratios
is printed, with the imbalance: the load of the busiest worker over the mean.
"""

from __future__ import annotations

import argparse
import time
from itertools import product
from statistics import median
from typing import Any

import torch

from swell.configs.schema import ParallelConfig
from swell.worker.comm.mesh import Mesh
from swell.worker.layers.moe import ExpertTraits, MoE
from swell.worker.layers.packed_weight import pack_weights
from swell.worker.layers.weight_shard import materialize
from swell.worker.moe.expert_placement import balance, imbalance
from swell.worker.moe.experts import holdings, move_experts
from swell.worker.wire import GroupPlan
from tests.worker.comm.test_mesh import in_threads

ENGINES, EXPERTS, HIDDEN, SIZE = 2, 16, 512, 1024
TRAITS = ExpertTraits(EXPERTS, SIZE, 2, True, False, ("gate", "up", "down"))


def make_layer(mesh: Mesh, skew: float) -> MoE:
    """Returns a layer. `skew`: how much more likely the first experts are, which are on the first
    engine."""
    layer = MoE(HIDDEN, TRAITS, mesh)
    materialize(layer, torch.device("cpu"), torch.float32)
    generator = torch.Generator().manual_seed(0)
    layer.router.weight.copy_(torch.randn(EXPERTS, HIDDEN, generator=generator))
    layer.router.weight[:, 0] = skew / (1.0 + torch.arange(EXPERTS)) ** 0.5
    weights = [
        (
            torch.randn(2 * SIZE, HIDDEN, generator=generator) / HIDDEN**0.5,
            torch.randn(HIDDEN, SIZE, generator=generator) / SIZE**0.5,
        )
        for _ in range(EXPERTS)
    ]
    share = EXPERTS // ENGINES
    first = mesh.data.rank * share
    layer.local_experts.update({e: weights[e] for e in range(first, first + share)})
    pack_weights(layer)
    layer.load = torch.zeros(EXPERTS, dtype=torch.int64)
    return layer


def measure(rank: int, store: Any, rows: int, skew: float, redundant: int, steps: int) -> Any:
    torch.set_num_threads(1)
    mesh = Mesh.build(ParallelConfig(expert=True), 0)
    mesh.begin(1)
    mesh.regroup(GroupPlan(1, None, 1, ENGINES, rank), None, store, timeout_s=60)
    mesh.tokens = [rows] * ENGINES
    layers = [make_layer(mesh, skew) for _ in range(2)]
    x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rank))
    x[:, 0] = HIDDEN**0.5
    same = [layer(x) for layer in layers]
    assert layers[1].load is not None
    load = mesh.data.all_gather(layers[1].load.unsqueeze(0), 0).tolist()
    [have] = holdings(layers[1:], mesh)
    placement = balance(load, have, EXPERTS, redundant)
    move_experts(layers[1], mesh, have, placement.holders, lambda: None)
    layers[1].share(placement.owners)
    assert torch.equal(layers[1](x), same[0]), "a bit has changed"
    ratios = []
    for _ in range(steps):
        seconds = []
        for layer in layers:
            mesh.data.all_gather(x[:1], 0)  # the ranks start together
            begun = time.perf_counter()
            layer(x)
            seconds.append(time.perf_counter() - begun)
        ratios.append(seconds[1] / seconds[0])
    before = [sum(chosen[e] for chosen in load for e in held) for held in have]
    found = imbalance(before), imbalance(placement.rank_loads(load, ENGINES))
    mesh.close()
    return median(ratios), *found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    print(
        "| tokens of each engine | copies more | imbalance before | after | time after / before |"
    )
    print("|---:|---:|---:|---:|---:|")
    for rows, redundant in product((64, 256), (0, 2, 4)):
        store = torch.distributed.HashStore()

        def work(rank: int, case: Any = (store, rows, 3.0, redundant, args.steps)) -> Any:
            return measure(rank, *case)

        ratio, before, after = in_threads(ENGINES, work)[0]
        print(f"| {rows} | {redundant} | {before:.2f} | {after:.2f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
