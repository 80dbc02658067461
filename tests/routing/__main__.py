"""`python -m tests.routing`: the gain of the router over other policies, on simulated
conversations."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from swell.cluster.cli.console import print_table
from tests.routing.policies import POLICIES
from tests.routing.simulation import BLOCK_TOKENS, Simulation, SimulationConfig
from tests.routing.trace import TraceConfig, generate

_SIZES: dict[str, tuple[tuple[float, int], ...]] = {
    "4": ((0.0, 4),),
    "4-6-3": ((0.0, 4), (40.0, 6), (80.0, 3)),
}
"""Plans of the number of engines: (time, number of engines)."""
_COLUMNS = (
    "policy",
    "engines",
    "ingresses",
    "hit rate",
    "TTFT mean, ms",
    "p50",
    "p99",
    "imbalance",
    "moved",
)


def rows(users_per_s: float, num_blocks: int, seed: int) -> Iterator[Sequence[str]]:
    """Yields one row of the table for each policy, number of ingresses and plan of sizes."""
    trace = generate(TraceConfig(users_per_s=users_per_s), seed, BLOCK_TOKENS)
    config = SimulationConfig(num_blocks=num_blocks)
    for plan, sizes in _SIZES.items():
        for ingresses in (1, 2, 3):
            for name, policy in POLICIES.items():
                outcome = Simulation(
                    trace, policy, ingresses=ingresses, sizes=sizes, config=config
                ).run()
                yield (
                    name,
                    plan,
                    str(ingresses),
                    f"{outcome.hit_rate:.1%}",
                    f"{1e3 * outcome.mean_ttft_s:.0f}",
                    f"{1e3 * outcome.ttft_quantile_s(50):.0f}",
                    f"{1e3 * outcome.ttft_quantile_s(99):.0f}",
                    f"{outcome.imbalance:.2f}",
                    f"{outcome.moved_rate:.1%}",
                )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.routing", description=__doc__)
    parser.add_argument("--users-per-s", type=float, default=3.0)
    parser.add_argument("--blocks", type=int, default=8192, help="of each engine's cache")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print_table("", _COLUMNS, rows(args.users_per_s, args.blocks, args.seed), left=2)


if __name__ == "__main__":
    main()
