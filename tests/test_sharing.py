"""The units of tests, and the priorities of test processes."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import sharing
from tests.slowest_files import COSTS, CPU, CostReporter, lines
from tests.test_layers import ROOT

STARTERS = {
    "ray",
    "tests.cluster.control.ray.real_ray.RealRay",
    "tests.e2e.cluster.Cluster",
    "tests.faults.hosts.hosts.Hosts",
    "tests.faults.process.Cluster",
    "tests.faults.trial.Trial",
}
"""Ray, and our classes that start it. Every test that starts Ray imports one of these."""
INTERFACES = {
    "tests.support.web.browser",
    "tests.faults.hosts.namespaces",
    "tests.faults.hosts.hosts",
}
"""The modules that notice changed network interfaces, and those that change them."""
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
    "tests/faults/hosts/test_hosts.py": "hosts without Ray",
}
NOTES_ITS_IMPORT = """
import os
with open("imported." + os.environ["PYTEST_XDIST_WORKER"], "a") as file:
    file.write("{name}")
def test_of_a_file(): pass
def test_a(): pass
"""
TWO_THREADS = """
import contextlib, os, pathlib, threading
from tests import sharing
from tests.slowest_files import COSTS, CPU, CostReporter, lines
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


def test_a_file_is_a_unit_and_all_files_that_start_ray_are_one() -> None:
    assert (
        sharing.unit("tests/worker/comm/test_mesh.py::test_a[1]")
        == "tests/worker/comm/test_mesh.py"
    )
    found = {sharing.unit(f"tests/e2e/{name}.py::test_a") for name in ("test_faults", "test_new")}
    assert found == {"clusters"}


def test_ray_comes_first_and_then_the_long_files() -> None:
    assert [name for name in sharing.LONG_FILES if not (ROOT / name).exists()] == []
    ids = [f"{name}::test_a" for name in ("tests/e2e/test_new.py", *sharing.LONG_FILES)]
    assert sorted(["tests/test_new.py::test_a", *reversed(ids)], key=sharing.start_order) == [
        *ids,
        "tests/test_new.py::test_a",
    ]


def test_each_process_begins_to_collect_at_another_place(tmp_path: Path) -> None:
    """Two processes import four files, the second one beginning at the third, and then agree on the
    order of the tests. Otherwise xdist would end the run with an error."""
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"test_{name}.py").write_text(NOTES_ITS_IMPORT.format(name=name))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n2", "-p", "tests.sharing", "--rootdir", tmp_path],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0 and "8 passed" in run.stdout, run.stdout + run.stderr
    assert (tmp_path / "imported.gw0").read_text() == "abcd"
    assert (tmp_path / "imported.gw1").read_text() == "cdab"


@pytest.mark.parametrize(
    ("expression", "source", "is_ignored"),
    [
        ("not slow", "pytestmark = pytest.mark.slow\n", True),
        ("not gpu and not slow", "pytestmark = [pytest.mark.slow, pytest.mark.gpu]\n", True),
        ("not slow", "pytestmark = [\n    pytest.mark.slow,\n]\n", True),
        ("not slow", "@pytest.mark.slow\ndef test_a(): ...\n", False),
        ("not slow", "pytestmark = pytest.mark.slow_variants\n", False),
        ("not slow_variants", "pytestmark = pytest.mark.slow\n", False),
        ("", "pytestmark = pytest.mark.slow\n", False),
    ],
)
def test_files_of_excluded_slow_tests_are_not_imported(
    tmp_path: Path, expression: str, source: str, is_ignored: bool
) -> None:
    path = tmp_path / "test_new.py"
    path.write_text(source)
    config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=expression))
    assert sharing.pytest_ignore_collect(path, config) == (is_ignored or None)


def test_the_cost_of_a_file_is_the_sum_over_its_tests() -> None:
    config: Any = SimpleNamespace(stash={COSTS: {}}, getoption=lambda _: 1)
    reporter = CostReporter(config)
    for name, cpu_s, wall_s in (("a.py::b", 2.0, 3.0), ("a.py::c[1]", 1.0, 1.0), ("d.py", 0.5, 0)):
        for when in ("call", "teardown"):
            properties = [(CPU, cpu_s)] if when == "teardown" else []
            report: Any = SimpleNamespace(
                nodeid=name, when=when, duration=wall_s / 2, user_properties=properties
            )
            reporter.pytest_runtest_logreport(report)
    assert lines(config.stash[COSTS], 1) == ["        3.0    4.0      2  a.py"]


def test_every_file_that_may_start_ray_belongs_to_their_unit() -> None:
    """Otherwise it would run with low priority, and in parallel with other tests."""
    found = {name for name, names in imports_of_test_files().items() if names & STARTERS}
    assert {name for name in found if not sharing.starts_ray(name)} <= set(STARTS_NONE)
    assert any(map(sharing.starts_ray, found))


def test_a_browser_and_changes_of_interfaces_share_a_unit() -> None:
    """Otherwise the browser would abort requests with ERR_NETWORK_CHANGED while another process
    creates or removes an interface."""
    files = imports_of_test_files().items()
    modules = {name: {one.rpartition(".")[0] for one in names} for name, names in files}
    found = [name for name, imported in modules.items() if imported & INTERFACES]
    assert set(sharing.NETWORKS) <= set(found)
    assert {sharing.unit(f"{name}::test_a") for name in found} == {"clusters"}


def imports_of_test_files() -> dict[str, set[str]]:
    return {
        path.relative_to(ROOT).as_posix(): imported_names(path)
        for path in (ROOT / "tests").rglob("test_*.py")
        if "third_party" not in path.parts
    }


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
def test_every_thread_and_the_session_have_the_low_priority() -> None:
    run = subprocess.run(
        [sys.executable, "-c", TWO_THREADS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    before, *priorities = map(int, run.stdout.split())
    if before >= sharing.PRIORITY:
        pytest.skip("this process may not have a higher priority than the tests")
    assert len(priorities) >= 3, "two threads and the session"
    assert set(priorities) == {sharing.PRIORITY}
