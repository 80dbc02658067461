"""Compiles the C++ backend at first use, once per machine, source and compiler.

The library is stored in `$SWELL_CACHE/kernels/<hash>/` (default `~/.cache/swell/kernels/<hash>/`),
where the hash covers the sources, the flags, the compiler's version and the processor's features.
Without a writable home, each process compiles it. If several processes need it, one builds it under
a temporary name and then renames it; the others wait, and see in its folder how far it is.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from swell.kernels.backends import BackendUnavailable, CompileProgress

SOURCES = Path(__file__).parent
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wno-psabi",
)
TYPES = (torch.float32, torch.bfloat16)
"""The types that this backend computes; the reference backend computes tensors of other types."""

_OTHER_BUILDER_S = 300.0
"""How long another process may take to build, in seconds; after that, this process builds, too."""
_POLL_S = 0.1

_log = logging.getLogger("swell.kernels")
_lock = threading.Lock()
_loaded: ctypes.CDLL | Exception | None = None
"""The library of this process, or the error with which its load failed; None: no call needed it."""


def _ignore(_done: int, _total: int) -> None:
    """Ignores progress."""


def library(progress: CompileProgress = _ignore) -> ctypes.CDLL:
    """Returns the loaded library. Raises `BackendUnavailable` after one line in the log."""
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = _load(progress)
    if isinstance(_loaded, Exception):
        raise BackendUnavailable(str(_loaded)) from _loaded
    return _loaded


def _load(progress: CompileProgress) -> ctypes.CDLL | Exception:
    try:
        with _cache() as home:
            return ctypes.CDLL(str(_built(home, progress)))
    except Exception as error:
        _log.warning(
            "CPU kernels are not available (%s): torch computes instead, with several times "
            "slower attention. Install g++ 12 or later to compile them.",
            error,
        )
        return error


@contextmanager
def _cache() -> Iterator[Path]:
    """Yields the folder for compiled kernels. If the account does not have a writable home, it is a
    new folder, which is removed after the library is loaded."""
    home = _kept_cache()
    if home is not None:
        yield home
        return
    _log.warning(
        "the home folder cannot be written: CPU kernels are compiled for this process only; set "
        "SWELL_CACHE to a permanent folder to keep them"
    )
    with tempfile.TemporaryDirectory(prefix="swell-kernels-") as folder:
        yield Path(folder)


def _kept_cache() -> Path | None:
    """Returns $SWELL_CACHE, otherwise a folder in the home; None: nothing can be stored there."""
    if configured := os.environ.get("SWELL_CACHE"):
        return Path(configured)
    with suppress(OSError, RuntimeError):  # there is no home, or it is not writable
        home = Path.home() / ".cache" / "swell"
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            return home
    return None


def _built(home: Path, progress: CompileProgress = _ignore) -> Path:
    compiler = _compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    openmp = _torch_openmp()
    digest = hashlib.sha256()
    for part in (version.stdout, " ".join(FLAGS), str(openmp), processor()):
        digest.update(part.encode() + b"\0")
    for path in sorted(SOURCES.glob("*.cpp")) + sorted(SOURCES.glob("*.h")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    folder = home / "kernels" / digest.hexdigest()[:24]
    target = folder / "kernels.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder, progress):
            if not target.exists():
                with tempfile.TemporaryDirectory(dir=folder) as build:
                    os.replace(_compile(compiler, openmp, Path(build), progress), target)
    return target


@contextmanager
def _exclusive(folder: Path, progress: CompileProgress) -> Iterator[None]:
    """Holds the lock of the folder, so that only one process builds; reports the progress of the
    process that holds it. The lock ends with its process; if another process holds it for too long,
    this one continues without it."""
    deadline = time.monotonic() + _OTHER_BUILDER_S
    with (folder / "lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    break
                progress(_count_compiled(folder), len(_sources()))
                time.sleep(_POLL_S)
        yield


def _count_compiled(folder: Path) -> int:
    """Returns how many files the newest build in this folder has compiled."""
    newest = 0.0, 0
    for build in folder.glob("tmp*"):
        with suppress(OSError):  # it has just finished
            newest = max(newest, (build.stat().st_mtime, len(list(build.glob("*.o")))))
    return newest[1]


def _sources() -> list[Path]:
    """Returns the files to compile, those that take longest first."""
    return sorted(SOURCES.glob("*.cpp"), key=lambda path: path.stat().st_size, reverse=True)


def _compile(compiler: str, openmp: Path | None, build: Path, progress: CompileProgress) -> Path:
    """Compiles all sources, as many at a time as there are cores, then links one shared library."""
    sources = _sources()
    progress(0, len(sources))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        jobs = [pool.submit(_compile_file, compiler, source, build) for source in sources]
        for done, job in enumerate(as_completed(jobs), 1):
            job.result()
            progress(done, len(sources))
    objects = sorted(str(path) for path in build.glob("*.o"))
    # Links torch's own OpenMP: a second runtime in the process would have a second thread pool.
    runtime = [str(openmp)] if openmp else ["-fopenmp"]
    output = build / "kernels.so"
    link = [compiler, "-shared", *objects, *runtime, "-o", str(output)]
    linked = subprocess.run(link, capture_output=True, text=True)
    if linked.returncode:
        raise RuntimeError(f"{compiler} failed to link: {_first_error(linked.stderr)}")
    return output


def _compile_file(compiler: str, source: Path, build: Path) -> None:
    """Compiles one file. The object has its name when it is complete: others count such names."""
    output = build / f"{source.stem}.part"
    command = [compiler, *FLAGS, "-c", str(source), "-o", str(output)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"{compiler} failed: {_first_error(done.stderr)}")
    output.rename(output.with_suffix(".o"))


def _first_error(text: str) -> str:
    lines = text.strip().splitlines() or ["no error message"]
    return next((line for line in lines if "error" in line), lines[0])


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "c++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise FileNotFoundError("no C++ compiler (CXX, g++, c++) is on the PATH")


def _torch_openmp() -> Path | None:
    """Returns the libgomp that torch loaded into this process."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "libgomp" in line}
    near = [path for path in sorted(paths) if os.sep + "torch" in path]
    return Path((near or sorted(paths))[0]) if paths else None


def processor() -> str:
    """Returns the properties of the processor that `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("flags", "Features", "model name")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
