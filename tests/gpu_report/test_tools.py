"""The stage of NVIDIA's tools, with programs of the same names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu_report.scale import Scale
from tests.gpu_report.stages import tools


def install(folder: Path, name: str, script: str) -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_tools_that_do_not_exist_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tools.run(Scale("cpu")) == dict.fromkeys(tools.TOOLS, "not installed")


def test_the_kernel_is_computed_under_each_tool(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    install(tmp_path, "ncu", 'shift 4; echo "$@"; "$@" && echo counted')
    install(tmp_path, "compute-sanitizer", "echo ERROR SUMMARY: 0 errors")
    monkeypatch.setattr(tools, "_LIMIT_S", 120.0)
    found = tools.run(Scale("cpu"))
    assert found["ncu"].endswith("counted") and "gpu_report.stages.tools cpu" in found["ncu"]
    assert found["compute-sanitizer"] == "ERROR SUMMARY: 0 errors"


def test_an_error_of_a_tool_fails_the_stage(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    install(tmp_path, "ncu", "echo ==ERROR== ERR_NVGPUCTRPERM; exit 1")
    install(tmp_path, "compute-sanitizer", "echo Invalid read; exit 9")
    assert tools.under("ncu", []) == "not permitted"
    with pytest.raises(AssertionError, match="exit code 9\nInvalid read"):
        tools.run(Scale("cpu"))
