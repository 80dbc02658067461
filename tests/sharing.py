"""Distribution of the tests over test processes (`pytest -n 3` of pytest-xdist).

The unit is a file, so that its fixtures are created once. All tests that start Ray are one unit, so
that only one cluster runs at a time. It comes first because it takes longest. Its process often
waits while the others compute with a low priority, which does not slow down the cluster.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

CLUSTERS = (
    "tests/e2e/",
    "tests/engine/executor/test_ray_executor.py",
    "tests/cluster/control/ray/test_ray_contract.py",
    "tests/cluster/control/ray/test_coordinator_on_ray.py",
    "tests/cluster/cli/doctor/test_doctor_on_ray.py",
)
"""Prefixes of the ids of tests that start Ray."""
PRIORITY = 10


def unit(test_id: str) -> str:
    """Returns the unit of a test. One process runs all tests of a unit."""
    return "clusters" if starts_ray(test_id) else test_id.partition("::")[0]


def starts_ray(test_id: str) -> bool:
    return test_id.startswith(CLUSTERS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if is_one_of_several(config):
        items.sort(key=lambda item: not starts_ray(item.nodeid))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Lowers the priority before the first test that does not start Ray. Tests that start Ray come
    first in their process and run with normal priority."""
    if is_one_of_several(item.config) and not starts_ray(item.nodeid):
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
