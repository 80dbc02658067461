"""The files whose tests take longest: `pytest --slowest-files 40` lists them at the end of a run.

Processor time is that of the test process and of the processes that it started and that have ended.
Ray's processes are not among them: compare tests that start Ray by their seconds.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from dataclasses import dataclass

import pytest

CPU = "cpu_s"
"""The name of the property of a test with its processor time, in seconds."""
_started = pytest.StashKey[float]()


@dataclass
class FileCost:
    """The cost of the tests of a file."""

    cpu_s: float = 0.0
    wall_s: float = 0.0
    num_tests: int = 0


COSTS = pytest.StashKey[dict[str, FileCost]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slowest-files", type=int, default=0, metavar="N", help="list the N slowest files"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--slowest-files"):
        config.stash[COSTS] = {}
        config.pluginmanager.register(CostReporter(config), "slowest-files")


def cpu_s() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[_started] = cpu_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    if call.when == "teardown":
        item.user_properties.append((CPU, cpu_s() - item.stash[_started]))
    return (yield)


class CostReporter:
    """Sums up the reports of the tests, also those of other test processes."""

    def __init__(self, config: pytest.Config) -> None:
        self._costs = config.stash[COSTS]
        self._num_files: int = config.getoption("--slowest-files")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cost = self._costs.setdefault(report.nodeid.partition("::")[0], FileCost())
        cost.wall_s += report.duration
        if report.when == "teardown":
            cost.num_tests += 1
            cost.cpu_s += float(dict(report.user_properties).get(CPU, 0.0))  # type: ignore[arg-type]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("slowest files")
        terminalreporter.write_line("processor s      s  tests  file")
        for line in lines(self._costs, self._num_files):
            terminalreporter.write_line(line)


def lines(costs: dict[str, FileCost], num_files: int) -> list[str]:
    """Returns a line for each of the files with the highest cost: processor time, or seconds where
    those are more, as in tests that wait for processes of Ray."""
    ranked = sorted(costs.items(), key=lambda file: -max(file[1].cpu_s, file[1].wall_s))
    return [
        f"{cost.cpu_s:11.1f} {cost.wall_s:6.1f} {cost.num_tests:6d}  {name}"
        for name, cost in ranked[:num_files]
    ]
