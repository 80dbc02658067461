"""Runs code in separate processes, each with a different hash seed and so a different order of
sets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable

from tests.support.deadlines import HANG_S
from tests.support.paths import ROOT


def outputs(code: str, hash_seeds: Iterable[str]) -> set[str]:
    """Returns the different outputs of the code for these hash seeds: one text if the output does
    not depend on them."""
    return {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=True,
        ).stdout
        for hash_seed in hash_seeds
    }
