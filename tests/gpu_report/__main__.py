"""Runs the stages one after the other, each in a process of its own with a deadline, the most
needed first. The report is written after each stage, so a run that is cut short keeps its results.
The exit code is 1 if a stage failed.

    python -m tests.gpu_report [--device cpu] [--json FILE] [STAGE ...]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.gpu_report.scale import Figures, Scale

DEADLINES_S = {
    "ceilings": 20,
    "doors": 45,
    "outputs": 60,
    "attention": 10,
    "decode": 60,
    "samplers": 15,
    "prefill": 25,
    "memory": 30,
    "exact": 30,
    "groups": 30,
    "symmetric": 20,
    "sleep": 20,
    "experts": 25,
    "large": 65,
    "adapters": 25,
    "tools": 20,
}
"""Stage -> its deadline in seconds, in the order in which they run; 500 s in all."""
_SLOWER_ON_CPU = 10
_ERROR_LINES = 12


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_report", description=__doc__)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"default: {list(DEADLINES_S)}")
    default = os.environ.get("SWELL_TEST_DEVICE", "cuda")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default)
    parser.add_argument("--json", type=Path, default=Path("build/gpu/report.json"), metavar="FILE")
    parser.add_argument("--inside", metavar="FILE", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    for stage in args.stages:
        if stage not in DEADLINES_S:
            parser.error(f"there is no stage {stage!r}; the stages are {', '.join(DEADLINES_S)}")
    if args.inside:
        return run_inside(args.stages[0], args.device, args.json, args.inside)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no GPU that torch can use; --device cpu runs tiny sizes")
    return run_all(args.stages or list(DEADLINES_S), args.device, args.json)


def run_inside(stage: str, device: str, report: Path, result: Path) -> int:
    """Runs one stage in this process. Writes its figures to `result`."""
    earlier = json.loads(report.read_text())["stages"] if report.exists() else {}
    figures = {name: found["figures"] for name, found in earlier.items() if "figures" in found}
    module = importlib.import_module(f"tests.gpu_report.stages.{stage}")
    result.write_text(json.dumps(module.run(Scale(device, figures))))
    return 0


def run_all(stages: list[str], device: str, report: Path) -> int:
    found: dict[str, Any] = {"machine": machine(device), "stages": {}}
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    print(f"{found['machine']}; the report is written to {report}", flush=True)
    for stage in stages:
        begun = time.monotonic()
        outcome = run_stage(stage, device, report)
        outcome["seconds"] = round(time.monotonic() - begun, 1)
        found["stages"][stage] = outcome
        report.write_text(json.dumps(found, indent=1) + "\n")
        print_stage(stage, outcome)
    return int(any("error" in outcome for outcome in found["stages"].values()))


def run_stage(
    stage: str, device: str, report: Path, deadlines_s: Mapping[str, float] = DEADLINES_S
) -> dict[str, Any]:
    """Runs one stage in a process of its own. Returns its figures or its error."""
    deadline_s = deadlines_s[stage] * (1 if device == "cuda" else _SLOWER_ON_CPU)
    with tempfile.TemporaryDirectory(prefix="swell-gpu-") as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        command = [sys.executable, "-m", "tests.gpu_report", stage, "--device", device]
        command += ["--json", str(report), "--inside", str(result)]
        with log.open("wb") as output:
            child = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code = child.wait(deadline_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(child)
        if code == 0:
            figures: Figures = json.loads(result.read_text())
            return {"figures": figures}
        why = f"exit code {code}" if code is not None else f"not done after {deadline_s:g} s"
        lines = log.read_text(errors="replace").splitlines()[-_ERROR_LINES:]
        return {"error": "\n".join([why, *lines])}


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends the stage's process and those that it started."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()


def machine(device: str) -> str:
    """Returns the device, the versions, and the day."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    try:
        triton = importlib.import_module("triton").__version__
    except ImportError:
        triton = "none"
    day = time.strftime("%Y-%m-%d")
    return f"{name}, torch {torch.__version__}, triton {triton}, {os.cpu_count()} cores, {day}"


def print_stage(stage: str, outcome: Mapping[str, Any]) -> None:
    print(f"\n{stage} ({outcome['seconds']} s)", flush=True)
    if "error" in outcome:
        print(f"  FAILED: {outcome['error']}", flush=True)
        return
    for name, value in outcome["figures"].items():
        print(f"  {name:45} {value}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
