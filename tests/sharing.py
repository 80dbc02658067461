"""Distribution of the tests over test processes (`pytest -n 4` of pytest-xdist).

The unit is a file, so that its fixtures are created once. Long files come first, so that none of
them is still running when the others are done. All tests that start Ray are one unit, so
that only one cluster runs at a time, and tests with a browser belong to it. It comes first because
it takes longest. Its process often waits while the others compute with a low priority, which does
not slow down the cluster.

Each process collects all tests, and each begins at another place, so that each compiles a part of
the files and reads the others, compiled, from the cache. Compiling all of them, with rewritten
assertions, takes 13 s of processor time.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

CLUSTERS = (
    "tests/e2e/",
    "tests/engine/executor/test_gpu_placement.py",
    "tests/engine/executor/test_ray_executor.py",
    "tests/cluster/control/ray/test_ray_contract.py",
    "tests/cluster/control/ray/test_coordinator_on_ray.py",
    "tests/cluster/cli/doctor/test_doctor_on_ray.py",
)
"""Prefixes of the ids of tests that start Ray."""
NETWORKS = (
    "tests/cluster/api/web/test_cluster_view.py",
    "tests/cluster/api/web/test_docs_page.py",
    "tests/cluster/api/web/test_playground.py",
    "tests/faults/hosts/test_hosts.py",
)
"""Further files with a browser or with network namespaces. A browser aborts its requests when an
interface of the machine changes, and most tests with namespaces start Ray."""
SLOW_FILE = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.slow\b", re.MULTILINE)
EXCLUDES_SLOW = re.compile(r"\bnot slow\b")
LONG_FILES = (
    "tests/engine/outputs/test_features.py",
    "tests/cluster/text/grammar/test_answer_grammars.py",
    "tests/cluster/api/server/test_loop_stall.py",
    "tests/engine/drafts/test_mtp.py",
    "tests/simulator/test_simulation.py",
    "tests/cluster/text/parsers/test_parser_invariants.py",
    "tests/kernels/test_narrow_vectors.py",
    "tests/engine/outputs/test_routed_experts.py",
    "tests/engine/drafts/test_draft_distribution.py",
    "tests/coordinator/wave_protocol/test_waves_model.py",
    "tests/cluster/control/plan/test_control_state.py",
    "tests/cluster/client/failover/test_handover.py",
    "tests/cluster/test_local_weights.py",
)
"""The files that take longest, longest first. `pytest --slowest-files 40` shows them."""
PRIORITY = 10
KEEPS_PRIORITY = "SWELL_TEST_KEEPS_PRIORITY"
"""The environment variable with which all tests run with normal priority: under load, tests of
low priority would hardly run."""


def unit(test_id: str) -> str:
    """Returns the unit of a test. One process runs all tests of a unit."""
    return "clusters" if test_id.startswith(CLUSTERS + NETWORKS) else test_id.partition("::")[0]


def starts_ray(test_id: str) -> bool:
    return test_id.startswith(CLUSTERS)


def start_order(test_id: str) -> int:
    """Returns the position of a test's unit. Units of the same position are sorted by name."""
    name = test_id.partition("::")[0]
    if starts_ray(test_id):
        return 0
    return 1 + LONG_FILES.index(name) if name in LONG_FILES else 1 + len(LONG_FILES)


def is_slow(source: str) -> bool:
    """Whether a test file marks all of its tests as slow."""
    return SLOW_FILE.search(source) is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Does not import files whose tests are all excluded as slow: imports take most of the time of
    a run without them."""
    if collection_path.suffix != ".py" or not EXCLUDES_SLOW.search(config.option.markexpr or ""):
        return None
    return is_slow(collection_path.read_text()) or None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Lets each process begin at another file or folder of each folder."""
    report = yield
    if isinstance(collector, pytest.Directory) and is_one_of_several(collector.config):
        workerinput = collector.config.workerinput  # type: ignore[attr-defined]
        process = int(workerinput["workerid"].removeprefix("gw"))
        first = process * len(report.result) // workerinput["workercount"]
        report.result = [*report.result[first:], *report.result[:first]]
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sorts the files. All processes have the same order, although they collect in another one."""
    if is_one_of_several(config):
        items.sort(key=lambda item: (start_order(item.nodeid), item.nodeid.partition("::")[0]))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Lowers the priority before the first test that does not start Ray. Tests that start Ray come
    first in their process and run with normal priority."""
    keeps = KEEPS_PRIORITY in os.environ or starts_ray(item.nodeid)
    if is_one_of_several(item.config) and not keeps:
        lower_priority()


def is_one_of_several(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def lower_priority() -> None:
    """Lowers the priority of every thread of this process and of the processes that they start. If
    Linux groups processes by session (autogroup), a priority counts only within the session, so the
    process gets its own session, with the same low priority."""
    if os.getpriority(os.PRIO_PROCESS, 0) < PRIORITY:
        for task in Path("/proc/self/task").glob("*"):
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(task.name), PRIORITY)
        with contextlib.suppress(OSError):  # no autogroups, or it leads its session already
            os.setsid()
            Path("/proc/self/autogroup").write_text(str(PRIORITY))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class LoadUnitScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

    config.option.loadscopereorder = False  # sorting by test count would put the Ray unit last
    return LoadUnitScheduling(config, log)
