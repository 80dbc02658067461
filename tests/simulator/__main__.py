"""Runs seeds of the simulator: `python -m tests.simulator --seeds 1000`; `--one SEED --shrink`."""

from __future__ import annotations

import argparse
import gc
import logging
import time
from collections import Counter
from datetime import UTC, datetime

from tests.simulator.coverage import table
from tests.simulator.faults import FAULTS
from tests.simulator.laws.laws import Run, judge
from tests.simulator.scenario import Scenario, draw
from tests.simulator.shrink import kind_of, shrink

_SEEDS_OF_A_DAY = 100_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--kinds", default=",".join(FAULTS))
    parser.add_argument("--faults", type=int, default=4, help="of a run, at most")
    parser.add_argument(
        "--operations", type=int, default=2, help="changes by an operator of a run, at most"
    )
    parser.add_argument("--one", type=int)
    parser.add_argument("--shrink", action="store_true", help="find a smaller scenario first")
    parser.add_argument(
        "--coverage", action="store_true", help="show in how many runs each transition was made"
    )
    parser.add_argument(
        "--today", action="store_true", help="begin at a seed that depends on the date"
    )
    parser.add_argument("--expert", type=int, choices=(0, 1), help="engines share experts, or not")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    kinds = tuple(args.kinds.split(","))
    expert = None if args.expert is None else bool(args.expert)
    if args.one is not None:
        scenario = draw(args.one, kinds, args.faults, expert, args.operations)
        if args.shrink and (broken_laws := _kinds(scenario)):
            scenario = shrink(scenario, lambda smaller: bool(broken_laws & _kinds(smaller)))
        run = Run(scenario)
        run.plane.kernel.log = []
        verdict = run.judge_to_end()
        for at, label, size in run.plane.kernel.log:
            print(f"{at:12.6f} {label} {size}")
        print(run.plane.scenario)
        print(*verdict.faults, *verdict.broken, sep="\n")
        return bool(verdict.broken)
    gc.disable()
    gc.freeze()
    if args.today:
        args.first += datetime.now(UTC).toordinal() * _SEEDS_OF_A_DAY
    begun, events, broken = time.process_time(), 0, {}
    transitions: Counter[str] = Counter()
    for seed in range(args.first, args.first + args.seeds):
        verdict = judge(draw(seed, kinds, args.faults, expert, args.operations))
        events += verdict.events
        transitions.update(verdict.transitions)
        if verdict.broken:
            broken[seed] = verdict
            print(seed, verdict.broken[:3], verdict.faults, flush=True)
        gc.collect()  # while the garbage is still in the CPU cache
    spent_s = time.process_time() - begun
    if args.coverage:
        print(*table(transitions, args.seeds), sep="\n")
    print(
        f"{args.seeds} runs from seed {args.first} in {spent_s:.1f} s, "
        f"{events / args.seeds:.0f} events each, {len(broken)} broken"
    )
    return bool(broken)


def _kinds(scenario: Scenario) -> set[str]:
    return {kind_of(broken) for broken in judge(scenario).broken}


if __name__ == "__main__":
    raise SystemExit(main())
