"""`python -m tests.faults`: every fault in every moment, or a row of random faults.

Exit code 1 if an answer failed or is wrong, or the cluster did not recover.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.faults import fault_types, moments
from tests.faults.fault_types import FAULTS, Fault
from tests.faults.leaks import cycles
from tests.faults.load import DECODE, ReferenceFailed
from tests.faults.moments import MOMENTS, Moment
from tests.faults.process import ClusterFailed
from tests.faults.report import Result, show, write_json, write_markdown
from tests.faults.trial import Cell, Setup, Trial, print_cell

_CONFIGS = Path(__file__).parents[2] / "configs"
_COMMON = ["cluster.stall_timeout_s=3", "serve.ingress_replicas=2"]

SETUPS = {
    "dense": Setup(
        "dense",
        str(_CONFIGS / "demo.yaml"),
        ["parallel.data=2", "parallel.tensor=2", "parallel.executor=ray", *_COMMON],
    ),
    "expert": Setup(
        "expert",
        str(_CONFIGS / "models" / "nano-moe"),
        ["parallel.data=2", "parallel.expert=true", "parallel.executor=ray", *_COMMON],
        waves=True,
    ),
}


def cells(
    rows: Sequence[Fault], columns: Sequence[Moment], *, waves: bool
) -> Iterator[tuple[Fault, Moment]]:
    """The cells that exist: sizes change one at a time, and dense engines have no waves."""
    for fault in rows:
        for moment in columns:
            if not (fault.rescales and moment.grows) and (waves or not moment.waves):
                yield fault, moment


def run_matrix(trial: Trial, args: argparse.Namespace) -> Iterator[Cell]:
    for fault, moment in cells(args.rows, args.columns, waves=trial.setup.waves):
        yield trial.cell(fault, moment)


def run_soak(trial: Trial, args: argparse.Namespace) -> Iterator[Cell]:
    """One row of random faults, each at full capacity."""
    yield trial.row(f"soak of {args.soak}", random_faults(args.rows, args.soak, args.seed), DECODE)


def run_storm(trial: Trial, args: argparse.Namespace) -> Iterator[Cell]:
    """The same, one every two seconds."""
    yield trial.storm(
        f"storm of {args.storm}", random_faults(args.rows, args.storm, args.seed), DECODE
    )


def random_faults(known: Sequence[Fault], count: int, seed: int) -> list[Fault]:
    """Random faults. The size goes up and down by one, so that it stays near the first."""
    rng = random.Random(seed)
    chosen: list[Fault] = []
    size = 0
    change = {"scale-up": 1, "scale-down": -1, "drain": -1}
    while len(chosen) < count:
        fault = rng.choice(known)
        step = change.get(fault.name, 0)
        if abs(size + step) <= 1:
            size += step
            chosen.append(fault)
    return chosen


def run_cycles(setups: Sequence[Setup], count: int, streams: int) -> int:
    """Print what each cycle of 1 -> 3 -> 1 leaves behind; 1 if a cluster failed."""
    for setup in setups:
        try:
            first = None
            for index, usage in enumerate(cycles(setup, count, streams)):
                first = first or usage
                print(f"{setup.name} after {index} cycles: {usage}", flush=True)
                if index == count:
                    print(f"{setup.name} grew most: {usage.growth(first)}", flush=True)
        except ClusterFailed as error:
            print(error, file=sys.stderr)
            return 1
    return 0


def attempt(setup: Setup, args: argparse.Namespace) -> Result:
    """All cells of one set-up; each is printed when it ends."""
    done: list[Cell] = []
    troubles: list[str] = []
    run = run_soak if args.soak else run_storm if args.storm else run_matrix
    trial = Trial(setup, args.streams, args.seed)
    try:
        for cell in run(trial, args):
            print_cell(cell)
            done.append(cell)
    except (ClusterFailed, ReferenceFailed) as error:
        troubles.append(str(error))
    finally:
        troubles += _end(trial)
    return Result(setup.name, setup.settings, done, "; ".join(troubles) or None)


def _end(trial: Trial) -> list[str]:
    """Stop its cluster, and return what did not end cleanly."""
    try:
        trial.close()
    except ClusterFailed as error:
        return [str(error)]
    return []


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    setups = args.setups
    if args.config:
        setups = [Setup("custom", args.config, [], waves=True)]
    setups = [Setup(s.name, s.config, [*s.settings, *args.set], s.waves) for s in setups]
    if args.cycles:
        return run_cycles(setups, args.cycles, args.streams)
    results = []
    for setup in setups:
        results.append(attempt(setup, args))
        show(results[-1])
    if args.json:
        write_json(args.json, results)
    if args.markdown:
        write_markdown(args.markdown, results)
    return 0 if all(result.good for result in results) else 1


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    add = made.add_argument
    add("--rows", type=_several(fault_types.named), default=list(FAULTS.values()), metavar="A,B")
    add("--columns", type=_several(moments.named), default=list(MOMENTS.values()), metavar="A,B")
    add("--setups", type=_several(_setup), default=list(SETUPS.values()), metavar="A,B")
    add("--config", help="another cluster: what `swell serve` takes, with --set")
    add("--set", action="append", default=[], metavar="section.key=value")
    add("--streams", type=int, default=32, help="requests in flight (default: 32)")
    add("--soak", type=int, default=0, metavar="N", help="N random faults of --rows in a row")
    add("--storm", type=int, default=0, metavar="N", help="the same, one every two seconds")
    add("--cycles", type=int, default=0, metavar="N", help="1 -> 3 -> 1 engines, and what is left")
    add("--seed", type=int, default=0, help="of requests, victims and the soak")
    add("--json", metavar="FILE")
    add("--markdown", metavar="FILE", help="a page with markers, as docs/reliability.md")
    return made


def _several(read: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def read_all(text: str) -> list[Any]:
        try:
            return [read(name) for name in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_all


def _setup(name: str) -> Setup:
    if name not in SETUPS:
        raise ValueError(f"no set-up {name!r}; the set-ups are: {', '.join(SETUPS)}")
    return SETUPS[name]


if __name__ == "__main__":
    sys.exit(main())
