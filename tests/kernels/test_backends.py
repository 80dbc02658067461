"""The choice of a backend, and the one that must be compiled."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from swell.kernels import backends
from tests.kernels.load import load_backend

pytestmark = pytest.mark.slow

ROOT = Path(backends.__file__).parent


@pytest.mark.parametrize("operation", backends.OPERATIONS)
def test_the_reference_is_complete(operation):
    """Each function of an interface exists under its name in the reference."""
    interface = importlib.import_module(f"swell.kernels.{operation}")
    module = backends.load("reference", operation)
    own = [
        name
        for name, value in vars(interface).items()
        if callable(value)
        and not isinstance(value, type)
        and value.__module__ == interface.__name__
    ]
    assert own
    assert all(callable(getattr(module, name)) for name in own)


def test_every_backend_file_has_an_interface():
    """The reference has all operations; the backend cpu has all but those of experts."""
    for backend, lacks in (("reference", set()), ("cpu", {"moe"})):
        names = {path.stem for path in (ROOT / backend).glob("*.py")}
        operations = names - {"__init__", "arena", "build", "graph"}
        assert operations == set(backends.OPERATIONS) - lacks


def test_an_unknown_device_takes_the_reference():
    assert backends.get("norm", "xpu").__name__ == "swell.kernels.reference.norm"


def test_without_a_compiler_one_line_and_the_reference(tmp_path):
    """In a process of its own: no compiler on the PATH and nothing in the cache."""
    program = (
        "import logging; logging.basicConfig(format='LOG %(message)s')\n"
        "from swell.kernels import backends\n"
        "for name in ('attention', 'norm', 'cache'):\n"
        "    print(backends.get(name, 'cpu').__name__)\n"
    )
    environment = {"PATH": str(tmp_path), "SWELL_CACHE": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [
        f"swell.kernels.reference.{name}" for name in ("attention", "norm", "cache")
    ]
    lines = [line for line in done.stderr.splitlines() if line.startswith("LOG")]
    assert len(lines) == 1
    assert "no C++ compiler" in lines[0]
    assert "plain torch" in lines[0]


def test_a_failed_build_is_named(monkeypatch, tmp_path, caplog):
    build = importlib.import_module("swell.kernels.cpu.build")
    (tmp_path / "broken.cpp").write_text("int main( {")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setenv("SWELL_CACHE", str(tmp_path / "cache"))
    with caplog.at_level(logging.WARNING, "swell.kernels"):
        failure = build._load_once.__wrapped__()
    assert isinstance(failure, Exception)
    assert "error" in caplog.text
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_one_openmp_runtime():
    """The compiled backend shares torch's pool of threads."""
    load_backend("cpu", "attention")
    torch.ones(1000, 1000).sum()
    lines = Path("/proc/self/maps").read_text().splitlines()
    assert len({line.split()[-1] for line in lines if "libgomp" in line}) == 1
