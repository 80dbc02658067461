"""One kernel of the smallest shape under NVIDIA's tools: `ncu` counts what the kernel does, and
`compute-sanitizer` finds accesses outside of tensors. A machine without one of them says so."""

from __future__ import annotations

import shutil
import subprocess
import sys

import torch

from swell.kernels.norm import rms_norm
from tests.gpu_report.scale import Figures, Scale

TOOLS = {
    "ncu": ["--launch-count", "1", "--section", "SpeedOfLight"],
    "compute-sanitizer": ["--tool", "memcheck", "--error-exitcode", "9"],
}
"""Program -> its options."""
_LIMIT_S = 9.0
_LINES = 12


def run(scale: Scale) -> Figures:
    """Raises `AssertionError` with the last lines of a tool that fails."""
    command = [sys.executable, "-m", "tests.gpu_report.stages.tools", scale.device]
    return {tool: under(tool, command) for tool in TOOLS}


def under(tool: str, command: list[str]) -> str:
    """Runs a command under a tool. Returns the last lines of its output."""
    program = shutil.which(tool)
    if program is None:
        return "not installed"
    try:
        result = subprocess.run(
            [program, *TOOLS[tool], *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_LIMIT_S,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {_LIMIT_S:g} s"
    last = "\n".join(result.stdout.splitlines()[-_LINES:])
    if "ERR_NVGPUCTRPERM" in result.stdout:
        return "not permitted"  # the machine keeps the counters for administrators
    assert result.returncode == 0, f"{tool}: exit code {result.returncode}\n{last}"
    return last


def compute(device: str) -> None:
    """Computes one kernel."""
    x = torch.ones(1, 16, device=device)
    rms_norm(x, torch.ones(16, device=device), 1e-6)
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    compute(sys.argv[1])
