"""A file may come from anywhere: each mutant of a valid file is unpacked, or refused with one line,
within a limit of memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

COUNT = 300


def test_every_mutant_is_unpacked_or_refused_with_one_line(tmp_path: Path) -> None:
    """In a process of its own, whose memory and CPU time are limited."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.support.gguf.mutants", str(tmp_path), str(COUNT)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    found = json.loads(child.stdout)
    assert found["unpacked"] > COUNT / 10 and found["refused"] > COUNT / 3
