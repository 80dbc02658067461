"""Paths of the repository that tests read."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
NANO = ROOT / "configs" / "models" / "nano"
NANO_MOE = ROOT / "configs" / "models" / "nano-moe"
CASES = ROOT / "tests" / "data" / "cases"
"""Inputs that failed once, with their right results."""
