"""How test processes share the tests (`pytest -n 3` of pytest-xdist).

A file is the unit, so that its fixtures are made once. All tests that start Ray are one unit, the
first because it is the longest: there is one cluster at a time. Its process often waits, while the
others compute with a low priority, which slows no cluster.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

CLUSTERS = (
    "tests/e2e/",
    "tests/engine/test_ray_executor.py",
    "tests/cluster/control/test_ray_contract.py",
    "tests/cluster/control/test_coordinator_on_ray.py",
    "tests/cluster/cli/doctor/test_doctor_on_ray.py",
)
"""How the ids of the tests begin that start Ray."""
PRIORITY = 10


def unit(test_id: str) -> str:
    """The unit of a test: the tests that one process gets together."""
    return "clusters" if starts_ray(test_id) else test_id.partition("::")[0]


def starts_ray(test_id: str) -> bool:
    return test_id.startswith(CLUSTERS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if is_one_of_several(config):
        items.sort(key=lambda item: not starts_ray(item.nodeid))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests that start Ray come first in their process, which then has the normal priority."""
    if is_one_of_several(item.config) and not starts_ray(item.nodeid):
        lower_priority()


def is_one_of_several(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def lower_priority() -> None:
    """Lower the priority of every thread of this process, and of the processes that they start.
    Where Linux groups processes by their session, a low priority counts only within the session:
    the process gets a session of its own, with the same low priority."""
    if os.getpriority(os.PRIO_PROCESS, 0) < PRIORITY:
        for task in Path("/proc/self/task").glob("*"):
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(task.name), PRIORITY)
        with contextlib.suppress(OSError):  # no such groups, or it leads its session already
            os.setsid()
            Path("/proc/self/autogroup").write_text(str(PRIORITY))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class LoadUnitScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

    config.option.loadscopereorder = False  # by the number of tests: what starts Ray has few
    return LoadUnitScheduling(config, log)
