"""`python -m tests.faults`: every fault at every moment, or a row of random faults; with `--hosts`,
over several hosts, whose links can fail, too.

The exit code is 1 if an answer failed or is wrong, or if the cluster did not recover.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tests.faults import fault_types, moments
from tests.faults.fault_types import FAULTS, Fault
from tests.faults.hosts import hosts as hosts_module
from tests.faults.hosts.host_cluster import HostCluster
from tests.faults.hosts.host_faults import HOST_FAULTS
from tests.faults.hosts.hosts import Hosts, HostsFailed
from tests.faults.leaks import cycles
from tests.faults.load import DECODE, ReferenceFailed
from tests.faults.moments import MOMENTS, Moment
from tests.faults.process import Cluster, ClusterFailed
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
_TWO_HOSTS = ["parallel.data=2", "cluster.cpus_per_worker=2", "cluster.stall_timeout_s=3"]
HOST_SETUPS = {
    "dense-hosts": Setup("dense-hosts", SETUPS["dense"].config, _TWO_HOSTS, full=True),
    "expert-hosts": Setup(
        "expert-hosts",
        SETUPS["expert"].config,
        ["parallel.expert=true", *_TWO_HOSTS],
        waves=True,
        full=True,
    ),
    "parted-hosts": Setup(
        "parted-hosts", SETUPS["dense"].config, _TWO_HOSTS, full=True, patient=True
    ),
}
"""An engine on each of two hosts; a third host is the head, without engines."""
_HOST_COLUMNS = ("idle", "decode", "rescale-prepare")
_ALL_FAULTS = {**FAULTS, **HOST_FAULTS}
_ALL_SETUPS = {**SETUPS, **HOST_SETUPS}
_STORM_LEAVES_OUT = ("nothing", "-head")
"""Faults that a storm omits: losing the head terminates the command `swell serve` and so the
storm."""


def cells(
    rows: Sequence[Fault], columns: Sequence[Moment], *, waves: bool, patient: bool = False
) -> Iterator[tuple[Fault, Moment]]:
    """Yields the combinations that exist: the size changes one step at a time, waves need engines
    that share experts, and faults that need patience have set-ups of their own."""
    for fault in (row for row in rows if row.needs_patience == patient):
        for moment in columns:
            if not (fault.adds and moment.grows) and (waves or not moment.waves):
                yield fault, moment


def run_matrix(trial: Trial, args: argparse.Namespace) -> Iterator[Cell]:
    setup = trial.setup
    for fault, moment in cells(args.rows, args.columns, waves=setup.waves, patient=setup.patient):
        yield trial.cell(fault, moment)


def run_soak(trial: Trial, args: argparse.Namespace) -> Iterator[Cell]:
    """Runs one row of random faults, each at full capacity."""
    yield trial.row(f"soak of {args.soak}", _chosen(trial, args, args.soak), DECODE)


def run_storm(trial: Trial, args: argparse.Namespace) -> Iterator[Cell]:
    """Runs random faults, one every `--every` seconds."""
    faults = _chosen(trial, args, args.storm)
    yield trial.storm(f"storm of {args.storm}", faults, DECODE, args.every)


def _chosen(trial: Trial, args: argparse.Namespace, count: int) -> list[Fault]:
    return random_faults(args.rows, count, args.seed, most=0 if trial.setup.full else 1)


def random_faults(known: Sequence[Fault], count: int, seed: int, most: int = 1) -> list[Fault]:
    """Returns random faults, half of them of hosts if there are any. The size changes by one at a
    time and stays near the first; `most`: the number of engines by which it may grow."""
    rng = random.Random(seed)
    kinds = [[fault for fault in known if fault.hits_host == host] for host in (False, True)]
    kinds = [kind for kind in kinds if kind]
    chosen: list[Fault] = []
    size = 0
    while len(chosen) < count:
        fault = rng.choice(rng.choice(kinds))
        if -1 <= size + fault.adds <= most:
            size += fault.adds
            chosen.append(fault)
    return chosen


def run_cycles(setups: Sequence[Setup], count: int, streams: int) -> int:
    """Prints the resources after each cycle of 1 -> 3 -> 1; returns 1 if a cluster failed."""
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


def attempt(
    setup: Setup,
    args: argparse.Namespace,
    start: Callable[..., Cluster] = Cluster,
    save: Callable[[Result], None] = lambda _result: None,
) -> Result:
    """Runs all cells of one set-up. Each cell is printed when it finishes, and saved with the
    earlier ones."""
    done: list[Cell] = []
    problems: list[str] = []
    run = run_soak if args.soak else run_storm if args.storm else run_matrix
    trial = Trial(setup, args.streams, args.seed, start)
    try:
        for cell in run(trial, args):
            print_cell(cell)
            done.append(cell)
            save(Result(setup.name, setup.settings, done))
    except (ClusterFailed, ReferenceFailed) as error:
        problems.append(str(error))
    finally:
        problems += _end(trial)
    return Result(setup.name, setup.settings, done, "; ".join(problems) or None)


def _end(trial: Trial) -> list[str]:
    """Stops the cluster of a trial; returns what did not terminate cleanly."""
    try:
        trial.close()
    except ClusterFailed as error:
        return [str(error)]
    return []


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    _choose(args)
    if args.cycles:
        return run_cycles(args.setups, args.cycles, args.streams)
    results: list[Result] = []

    def save(result: Result) -> None:
        if args.json:
            write_json(args.json, [*results, result])

    with contextlib.ExitStack() as stack:
        start: Callable[..., Cluster] = Cluster
        if args.hosts:
            try:
                hosts = stack.enter_context(_hosts())
            except HostsFailed as error:
                print(error, file=sys.stderr)
                return 1
            start = partial(HostCluster, hosts)
        for setup in args.setups:
            if args.hosts:
                hosts.be_patient(setup.patient)
            results.append(attempt(setup, args, start, save))
            show(results[-1])
    if args.json:
        write_json(args.json, results)
    if args.markdown:
        write_markdown(args.markdown, results)
    return 0 if all(result.good for result in results) else 1


def _choose(args: argparse.Namespace) -> None:
    """Fills in everything that fits for options that were not given."""
    faults = {**HOST_FAULTS} if args.hosts else FAULTS
    if args.hosts and args.storm:
        faults = {
            name: fault
            for name, fault in _ALL_FAULTS.items()
            if not (name.endswith(_STORM_LEAVES_OUT) or fault.needs_patience)
        }
    columns = _HOST_COLUMNS if args.hosts else MOMENTS
    setups = list((HOST_SETUPS if args.hosts else SETUPS).values())
    if args.config:
        setups = [Setup("custom", args.config, [], waves=True)]
    args.rows = args.rows or list(faults.values())
    args.columns = args.columns or [MOMENTS[name] for name in columns]
    args.setups = [
        msgspec.structs.replace(setup, settings=[*setup.settings, *args.set])
        for setup in args.setups or setups
    ]


def _hosts() -> Hosts:
    """Returns a head without engines, and two hosts with room for one each. Raises HostsFailed."""
    if reason := hosts_module.refusal():
        raise HostsFailed(reason)
    return Hosts(3, cpus=2, head_cpus=0, redis=shutil.which("redis-server"))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    add = made.add_argument
    rows = partial(fault_types.find, known=_ALL_FAULTS)
    add("--hosts", action="store_true", help="over two hosts with engines, and a head")
    add("--rows", type=_several(rows), metavar="A,B")
    add("--columns", type=_several(moments.named), metavar="A,B")
    add("--setups", type=_several(_setup), metavar="A,B")
    add("--config", help="another cluster: what `swell serve` takes, with --set")
    add("--set", action="append", default=[], metavar="section.key=value")
    add("--streams", type=int, default=32, help="requests in flight (default: 32)")
    add("--soak", type=int, default=0, metavar="N", help="N random faults of --rows in a row")
    add("--storm", type=int, default=0, metavar="N", help="the same, one every two seconds")
    add("--every", type=float, default=2.0, metavar="S", help="seconds between faults of a storm")
    add("--cycles", type=int, default=0, metavar="N", help="1 -> 3 -> 1 engines, and what is left")
    add("--seed", type=int, default=0, help="of requests, victims and the soak")
    add("--json", metavar="FILE")
    add("--markdown", metavar="FILE", help="a page with markers, as docs/lab/fault-matrix.md")
    return made


def _several(read: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def read_all(text: str) -> list[Any]:
        try:
            return [read(name) for name in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_all


def _setup(name: str) -> Setup:
    if name not in _ALL_SETUPS:
        raise ValueError(f"no set-up {name!r}; the set-ups are: {', '.join(_ALL_SETUPS)}")
    return _ALL_SETUPS[name]


if __name__ == "__main__":
    sys.exit(main())
