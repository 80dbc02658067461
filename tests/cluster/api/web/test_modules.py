"""The parts of the page's JavaScript that need no page, tested by Node."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from swell.cluster.api.web.page_routes import FOLDER
from tests.support.deadlines import HANG_S

NODE = shutil.which("node")
TESTS = Path(__file__).parent / "modules"


@pytest.mark.slow
@pytest.mark.skipif(NODE is None, reason="node is not installed (Debian: nodejs)")
@pytest.mark.parametrize("name", sorted(path.name for path in TESTS.glob("*.test.js")))
def test_modules_do_what_their_tests_state(name: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "static")
    shutil.copy(TESTS / name, tmp_path)
    # Browsers know from the page that the files are modules; Node knows it from this file.
    (tmp_path / "package.json").write_text('{"type": "module"}')
    command = [str(NODE), "--test", name]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)
    assert run.returncode == 0, run.stdout + run.stderr
