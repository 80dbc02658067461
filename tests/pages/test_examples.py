"""Runs the examples as a newcomer would. The examples of a server are in `tests/e2e/one_engine`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.deadlines import HANG_S
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"
OF_A_SERVER = ("stream", "tools", "session", "rescale")


def run_example(name: str, *arguments: str) -> str:
    """Runs an example and returns its output."""
    run = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *arguments],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"offline", *OF_A_SERVER}


@pytest.mark.slow
def test_offline() -> None:
    assert run_example("offline").splitlines() == [
        "kitten: nettik",
        "planet: tenalp",
        "garden: nedrag",
    ]
