"""The lines that show how far a run is, and the end of a run that hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.progress import Progress
from tests.support.deadlines import HANG_S
from tests.test_layers import ROOT

SHORT_SILENCE = """
from tests.progress import Progress
def pytest_sessionstart(session):
    if not hasattr(session.config, "workerinput"):
        Progress(session.config, silence_s=1.0).start()
"""
SUSPENDS_ITSELF = """
import os, signal
def test_a(): pass
def test_b(): os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_line_names_the_tests_that_run_longest() -> None:
    plugins = SimpleNamespace(getplugin=lambda _: None)
    config: Any = SimpleNamespace(pluginmanager=plugins, option=SimpleNamespace())
    progress = Progress(config)
    for name in "abcdef":
        progress.pytest_runtest_logstart(name)
    progress.pytest_runtest_logfinish("b")
    line = progress.line(progress.begin + 600.0)
    assert line.startswith("[10 min, 1 tests, load ")
    assert [test.split(" for ")[0] for test in line.partition("] ")[2].split("; ")] == [*"acde"]


def test_a_run_ends_although_its_test_process_is_suspended(tmp_path: Path) -> None:
    """`timeout` cannot interrupt such a test."""
    (tmp_path / "conftest.py").write_text(SHORT_SILENCE)
    (tmp_path / "test_new.py").write_text(SUSPENDS_ITSELF)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-n1", "--max-worker-restart=0", "--rootdir", tmp_path],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )
    assert run.returncode != 0
    assert "No test has begun or ended for 1 s." in run.stdout, run.stdout + run.stderr
    assert "killed " in run.stdout
