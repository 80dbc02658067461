"""The units of tests, and the priorities of test processes."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests import sharing
from tests.test_layers import ROOT

STARTERS = {
    "ray",
    "tests.cluster.control.ray.real_ray.RealRay",
    "tests.e2e.cluster.Cluster",
    "tests.faults.hosts.Hosts",
    "tests.faults.process.Cluster",
    "tests.faults.trial.Trial",
}
"""Ray, and our classes that start it. Every test that starts Ray imports one of these."""
STARTS_NONE = {
    "tests/cluster/cli/test_documented_commands.py": "commands of Ray, by name",
    "tests/cluster/cli/start/test_application.py": "calls into Ray and Serve, which are planted",
    "tests/cluster/cli/start/test_local_ray.py": "attempts to start Ray, which is planted",
    "tests/cluster/cli/test_launch.py": "states of Serve",
    "tests/configs/test_cluster_files.py": "schemas of Ray",
    "tests/cluster/control/ray/test_launch.py": "how an application ends; Ray is a table",
    "tests/cluster/control/ray/test_ray_cluster.py": "errors of Ray",
    "tests/engine/serving/test_actor.py": "Ray's answers are planted",
    "tests/engine/executor/test_worker_replacement.py": "errors of Ray",
    "tests/faults/test_hosts.py": "hosts without Ray",
    "tests/test_reliability_page.py": "Ray's constants",
}
TWO_THREADS = """
import contextlib, os, pathlib, threading
from tests import sharing
with contextlib.suppress(PermissionError):  # the tests may have a low priority themselves
    os.setpriority(os.PRIO_PROCESS, 0, 0)
waiting = threading.Event()
threading.Thread(target=waiting.wait).start()
tasks = [int(task) for task in os.listdir("/proc/self/task")]
print(os.getpriority(os.PRIO_PROCESS, 0))
sharing.lower_priority()
sharing.lower_priority()
print(*[os.getpriority(os.PRIO_PROCESS, task) for task in tasks])
group = pathlib.Path("/proc/self/autogroup")
print(group.read_text().split()[-1] if group.exists() else sharing.PRIORITY)
waiting.set()
"""


def test_a_file_is_a_unit_and_what_starts_ray_is_one() -> None:
    assert (
        sharing.unit("tests/worker/comm/test_mesh.py::test_a[1]")
        == "tests/worker/comm/test_mesh.py"
    )
    found = {sharing.unit(f"tests/e2e/{name}.py::test_a") for name in ("test_faults", "test_new")}
    assert found == {"clusters"}


def test_every_file_that_may_start_ray_belongs_to_their_unit() -> None:
    """Otherwise it would run with low priority, and in parallel with other tests."""
    files = {
        path.relative_to(ROOT).as_posix(): imported_names(path)
        for path in (ROOT / "tests").rglob("test_*.py")
        if "third_party" not in path.parts
    }
    found = {name for name, names in files.items() if names & STARTERS}
    assert {name for name in found if not sharing.starts_ray(name)} <= set(STARTS_NONE)
    assert any(map(sharing.starts_ray, found))


def imported_names(path: Path) -> set[str]:
    """Returns the imported libraries, and the names that are imported from modules."""
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names | {name.partition(".")[0] for name in names}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_every_thread_and_the_session_get_the_low_priority() -> None:
    run = subprocess.run(
        [sys.executable, "-c", TWO_THREADS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    before, *priorities = map(int, run.stdout.split())
    if before >= sharing.PRIORITY:
        pytest.skip("this process may not have a higher priority than the tests")
    assert priorities == [sharing.PRIORITY] * 3
