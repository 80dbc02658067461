"""`python -m tests.benchmarks [CASE ...]`: measures cases, prints a table, and records the results.

A case is chosen by its name or a prefix of it. The exit code is 1 if a case could not be measured;
a missed target is a result, not an error.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks import machine, report, results
from tests.benchmarks.case import PEERS, Case, Setup
from tests.benchmarks.cases import CASES, chosen
from tests.benchmarks.children import ContenderFailed, end_all
from tests.benchmarks.interleaved import log
from tests.benchmarks.models import default_folder
from tests.benchmarks.results import CaseResult, Figure, Results


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.list:
        for name, case in CASES.items():
            print(f"{name:20} {case.summary}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    cases = chosen(args.names)
    logs = Path(tempfile.mkdtemp(prefix="swell-bench-"))
    setup = Setup(args.repeats, dict(args.peers), Path(args.models), logs)
    done: Results = {}
    failed = []
    try:
        failed = [name for name, case in cases.items() if not measure(name, case, setup, done)]
    except KeyboardInterrupt:
        return 130
    finally:
        end_all()
        shutil.rmtree(logs, ignore_errors=True)
        if done:
            report.show(done)
            write(args, done)
    return 1 if failed else 0


def measure(name: str, case: Case, setup: Setup, done: Results) -> bool:
    """Adds the result of a case to `done`; returns False if it could not be measured."""
    log(f"{name}: {case.summary}")
    started = time.perf_counter()
    try:
        measured = case.run(setup)
    except ContenderFailed as error:
        log(f"{name} could not be measured: {error}")
        return False
    done[name] = CaseResult(
        measured.figures,
        machine.machine(),
        machine.versions(),
        peer_versions(setup, measured.figures),
        machine.today(),
        machine.commit(),
        setup.repeats,
        time.perf_counter() - started,
        measured.problems,
    )
    return True


def peer_versions(setup: Setup, figures: Sequence[Figure]) -> dict[str, str]:
    """Returns the versions of the peers that figures are compared with."""
    named = {figure.against for figure in figures}
    return {
        f"{peer.title} ({peer.package})": machine.version_in(setup.peers[name], peer.package)
        for name, peer in PEERS.items()
        if peer.title in named
    }


def write(args: argparse.Namespace, done: Results) -> None:
    """Writes the results. The JSON file keeps its results of other cases; the page and the plot
    show all of them."""
    shown = done
    if args.json:
        results.write(Path(args.json), done)
        shown = results.read(Path(args.json))
    shown = {name: shown[name] for name in CASES if name in shown}
    if args.markdown:
        report.write_markdown(Path(args.markdown), shown)
    if args.plot:
        from tests.benchmarks.plot import plot

        plot(Path(args.plot), shown)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    add = made.add_argument
    add("names", metavar="CASE", nargs="*", help="default: all")
    add(
        "--peers",
        metavar="NAME=PYTHON",
        type=_peer,
        nargs="*",
        default=[],
        help=f"interpreters in which peers are installed: {', '.join(PEERS)}",
    )
    add("--repeats", metavar="N", type=int, default=3, help="rounds of each case (default 3)")
    add("--models", metavar="FOLDER", default=str(default_folder()), help="default %(default)s")
    add("--json", metavar="FILE", help="keeps the results of other cases in the file")
    add("--markdown", metavar="FILE", help="a page with markers, as docs/lab/performance.md")
    add("--plot", metavar="FILE", help="ratios, as SVG or PNG")
    add("--list", action="store_true", help="print the cases")
    return made


def _peer(text: str) -> tuple[str, str]:
    name, sign, interpreter = text.partition("=")
    if name not in PEERS or not sign:
        known = ", ".join(PEERS)
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=PYTHON; the names are: {known}")
    return name, interpreter


def _run() -> int:
    try:
        return main()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(_run())
