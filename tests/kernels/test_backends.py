"""The choice of a backend, and the compilation of the backend cpu."""

from __future__ import annotations

import fcntl
import importlib
import logging
import os
import pkgutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from swell.kernels import backends
from tests.kernels.load import load_backend
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

ROOT = Path(backends.__file__).parent

LEFT_BY_CPU = {"qkv"}
"""Operations that the backend cpu leaves to the reference."""
GPU_WITHOUT_COMPILER = (
    "torch.cuda.is_available, torch.cuda.get_device_capability = lambda: True, lambda: (9, 0)\n"
    "os.environ.update(PATH='', CC='')"
)
"""Lets a process have a GPU, and no compiler with which Triton could launch kernels."""
HELPERS = {
    "build",
    "capture",
    "exchange",
    "float8",
    "graph",
    "padding",
    "quantized",
    "quantized_cache",
}
"""Modules of backends that implement no operation."""


@pytest.mark.parametrize("operation", backends.OPERATIONS)
def test_the_reference_is_complete(operation):
    """Every function of an interface exists under its name in the reference."""
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
    """Every backend file has an interface: the reference implements all operations, the others
    some."""
    for backend, lacks in (("reference", set()), ("cpu", LEFT_BY_CPU), ("triton", set())):
        modules = {module.name for module in pkgutil.iter_modules([str(ROOT / backend)])}
        operations = modules - HELPERS
        assert operations == set(backends.OPERATIONS) - lacks


@pytest.fixture
def sums_of_products():
    """Yields a function to the settings by which cuBLAS may add in 16 bits. At first both are on,
    which is torch's default; after the test they are as before."""
    matmul = torch.backends.cuda.matmul
    names = [f"allow_{name}_reduced_precision_reduction" for name in ("bf16", "fp16")]
    before = [getattr(matmul, name) for name in names]
    for name in names:
        setattr(matmul, name, True)
    yield lambda: [name for name in names if getattr(matmul, name)]
    for name, value in zip(names, before, strict=True):
        setattr(matmul, name, value)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_prepared_backends_add_in_float32(monkeypatch, sums_of_products, device):
    """`kernels/linear.py` promises such sums."""
    assert len(sums_of_products()) == 2
    monkeypatch.setattr(backends, "OPERATIONS", ())
    backends.prepare(device)
    assert sums_of_products() == []


def test_an_unknown_device_uses_the_reference():
    assert backends.get("norm", "xpu").__name__ == "swell.kernels.reference.norm"


@pytest.mark.parametrize(
    ("triton", "machine", "reason"),
    [
        ("None", "", "install triton"),
        ("types.SimpleNamespace(__version__='3.5.1')", "", "triton is 3.5.1"),
        ("types.SimpleNamespace(__version__='3.6.0')", GPU_WITHOUT_COMPILER, "no C compiler"),
    ],
)
def test_without_what_triton_needs_one_line_is_logged_and_the_reference_is_used(
    triton, machine, reason
):
    program = (
        "import logging, os, sys, types, torch; logging.basicConfig(format='LOG %(message)s')\n"
        "from swell.kernels import backends, norm\n"
        f"sys.modules['triton'] = {triton}\n"
        f"{machine}\n"
        "for name in backends.OPERATIONS:\n"
        "    print(backends.get(name, 'cuda').__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=HANG_S
    )
    assert done.stdout.split() == [f"swell.kernels.reference.{x}" for x in backends.OPERATIONS]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("LOG")]
    assert reason in line and "torch computes instead" in line


def test_without_a_compiler_one_line_is_logged_and_the_reference_is_used(tmp_path):
    """Without a compiler there is one log line, and the reference is used. It runs in its own
    process with no compiler on the PATH and an empty cache."""
    program = (
        "import logging; logging.basicConfig(format='LOG %(message)s')\n"
        "from swell.kernels import backends\n"
        "for name in ('attention', 'norm', 'rope'):\n"
        "    print(backends.get(name, 'cpu').__name__)\n"
    )
    environment = {"PATH": str(tmp_path), "SWELL_CACHE": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [
        f"swell.kernels.reference.{name}" for name in ("attention", "norm", "rope")
    ]
    lines = [line for line in done.stderr.splitlines() if line.startswith("LOG")]
    assert len(lines) == 1
    assert "no C++ compiler" in lines[0]
    assert "torch computes instead" in lines[0]


def test_a_failed_build_is_named(monkeypatch, tmp_path, caplog):
    build = importlib.import_module("swell.kernels.cpu.build")
    (tmp_path / "broken.cpp").write_text("int main( {")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setenv("SWELL_CACHE", str(tmp_path / "cache"))
    with caplog.at_level(logging.WARNING, "swell.kernels"):
        failure = build._load(lambda _done, _total: None)
    assert isinstance(failure, Exception)
    assert "error" in caplog.text
    assert not list((tmp_path / "cache").rglob("*.so"))


@pytest.fixture
def other_builder(monkeypatch, tmp_path):
    """Yields the build module, the lock as another building process holds it, and the folders that
    this process has built."""
    build = importlib.import_module("swell.kernels.cpu.build")
    built = []

    def compile(_compiler, _openmp, folder, _progress):
        built.append(folder)
        (folder / "kernels.so").touch()
        return folder / "kernels.so"

    monkeypatch.setattr(build, "_compile", compile)
    monkeypatch.setenv("SWELL_CACHE", str(tmp_path))
    folder = build._built(tmp_path).parent
    (folder / "kernels.so").unlink()
    built.clear()
    with (folder / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield build, lock, built


def test_a_build_reports_each_file(monkeypatch, tmp_path):
    build = importlib.import_module("swell.kernels.cpu.build")
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.cpp").write_text(f"int {name}() {{ return 1; }}")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    reported = []
    assert build._built(tmp_path, lambda *counts: reported.append(counts)).exists()
    assert reported == [(0, 3), (1, 3), (2, 3), (3, 3)]
    build._built(tmp_path, lambda *counts: reported.append(counts))
    assert len(reported) == 4, "nothing is compiled again"


def test_a_process_that_waits_reports_the_files_of_the_one_that_builds(other_builder, tmp_path):
    build, lock, _ = other_builder
    folder = Path(lock.name).parent
    (folder / "tmp-left").mkdir()  # by a process that was killed
    os.utime(folder / "tmp-left", (0, 0))
    (folder / "tmp-now").mkdir()
    for name in ("attention.o", "norm.o", "rope.part"):
        (folder / "tmp-now" / name).touch()
    total = len(list(build.SOURCES.glob("*.cpp")))
    reported = []

    def report(*counts):
        reported.append(counts)
        fcntl.flock(lock, fcntl.LOCK_UN)

    build._built(tmp_path, report)
    assert reported == [(2, total)]


@pytest.mark.parametrize(("device", "compiles"), [("cpu", True), ("cuda", False)])
def test_preparing_a_device_reports_its_compilation(monkeypatch, device, compiles):
    build = importlib.import_module("swell.kernels.cpu.build")
    monkeypatch.setattr(build, "library", lambda progress: progress(1, 2))
    monkeypatch.setattr(backends, "OPERATIONS", ())
    reported = []
    backends.prepare(device, lambda *counts: reported.append(counts))
    assert reported == [(1, 2)] * compiles


def test_concurrent_processes_build_it_once(other_builder, tmp_path):
    build, lock, built = other_builder
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(build._built, tmp_path)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=3 * build._POLL_S)
        Path(lock.name).with_name("kernels.so").touch()
        fcntl.flock(lock, fcntl.LOCK_UN)
    assert waiting.result().exists() and built == []


def test_the_wait_for_a_hanging_build_has_a_deadline(other_builder, tmp_path, monkeypatch):
    build, _lock, built = other_builder
    monkeypatch.setattr(build, "_OTHER_BUILDER_S", 0.0)
    assert build._built(tmp_path).exists() and len(built) == 1


@pytest.mark.parametrize("home", ["missing/below/a/file", None])
def test_without_a_home_kernels_are_compiled_for_this_process(monkeypatch, tmp_path, caplog, home):
    build = importlib.import_module("swell.kernels.cpu.build")
    (tmp_path / "missing").write_text("no folder")
    monkeypatch.delenv("SWELL_CACHE", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", (lambda: tmp_path / home) if home else no_home)
    with build._cache() as folder:
        assert folder.parent == tmp_path and folder.stat().st_mode & 0o077 == 0
    assert not folder.exists() and "set SWELL_CACHE" in caplog.text
    with pytest.raises(OSError, match="planted"), build._cache():
        raise OSError("planted")


def test_only_one_openmp_runtime_is_loaded():
    """The compiled backend shares torch's pool of threads."""
    load_backend("cpu", "attention")
    torch.ones(1000, 1000).sum()
    lines = Path("/proc/self/maps").read_text().splitlines()
    assert len({line.split()[-1] for line in lines if "libgomp" in line}) == 1
