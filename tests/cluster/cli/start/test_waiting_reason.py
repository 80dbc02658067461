"""A start that compiles kernels reports this."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from swell.cluster.cli.start.waiting_reason import build_note


@pytest.mark.parametrize("place", ["SWELL_CACHE", "HOME"])
def test_a_build_is_announced_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.delenv("SWELL_CACHE", raising=False)
    monkeypatch.setenv(place, str(tmp_path))
    build = importlib.import_module("swell.kernels.cpu.build")
    notes = list[str]()

    def compile(_compiler: object, _openmp: object, folder: Path) -> Path:
        notes.append(build_note())
        os.utime(folder, (0, 0))
        notes.append(build_note())
        (folder / "kernels.so").touch()
        return folder / "kernels.so"

    monkeypatch.setattr(build, "_compile", compile)
    assert build_note() == ""
    with build._cache() as home:
        build._built(home)
    assert notes == [" (kernels are compiled, once on each machine)", ""] and build_note() == ""


def test_without_a_home_no_build_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SWELL_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert build_note() == ""
