"""Runs pytest with the arguments after `--` while other processes are busy, and with stalls.

python -m tests.loaded -- -n 4 -m "not gpu and not slow_variants" tests/cluster
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.sharing import KEEPS_PRIORITY
from tests.support.paths import ROOT

STALLS = Path(__file__).parent / "stalls"
RAY_PRIORITY = "RAY_worker_niceness"
"""Ray gives its workers a low priority. Next to busy processes they would hardly run."""
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    sum(range(10**6))"
"""The program of a busy process. It ends after its parent, whose id it gets as an argument."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.loaded", description=__doc__)
    parser.add_argument("--busy", type=int, default=8, help="the number of busy processes")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest")
    args = parser.parse_args()
    path = os.pathsep.join(filter(None, (str(STALLS), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, KEEPS_PRIORITY: "1", RAY_PRIORITY: "0"}
    busy_command = [sys.executable, "-S", "-c", BUSY, str(os.getpid())]
    busy = [subprocess.Popen(busy_command) for _ in range(args.busy)]
    try:
        command = [sys.executable, "-m", "pytest", *args.pytest]
        return subprocess.call(command, cwd=ROOT, env=environment)
    finally:
        for process in busy:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
