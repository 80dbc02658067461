"""Creates a folder that appears complete or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOCK = ".swell-save.lock"
RESERVE_BYTES = 64 * 2**20
"""Bytes that must stay free on the disk."""


def refuse_existing(out: Path) -> None:
    """Raises `ValueError` unless `out` can be created: it must be absent or empty, and its parent
    must exist."""
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ValueError(
            f"{str(out)!r} exists and is not an empty folder, and saving never overwrites files; "
            "specify another folder, or remove it"
        )
    if not out.parent.is_dir():
        raise ValueError(f"{str(out)!r}: the folder {str(out.parent)!r} does not exist; create it")


def refuse_full_disk(out: Path, size_bytes: int) -> None:
    """Raises `ValueError` if this many bytes do not fit on the disk of `out`."""
    free = shutil.disk_usage(out.parent).free
    if free < size_bytes + RESERVE_BYTES:
        raise ValueError(
            f"{str(out)!r} needs {size_bytes} bytes and {RESERVE_BYTES} in reserve, but its disk "
            f"has {free} free; free some space, or specify a folder on another disk"
        )


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yields a folder next to `out` to write into, which is renamed to `out` when the block ends.
    Files that another process left there when it was killed are removed. `refuse_existing` must
    have been called. Raises `ValueError`."""
    partial = out.parent / f".{out.name}.saving"
    lock = partial / _LOCK
    if partial.exists() and not lock.is_file():
        raise ValueError(
            f"{str(partial)!r} exists and was not left by an interrupted save; remove it"
        )
    partial.mkdir(exist_ok=True)
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is saving to {str(out)!r}; wait until it has finished"
            ) from None
        try:
            for rest in partial.iterdir():
                if rest.is_dir():
                    shutil.rmtree(rest)
                elif rest != lock:
                    rest.unlink()
            yield partial
            _sync(partial)
            os.rename(partial, out)
        except BaseException:
            shutil.rmtree(partial)
            raise
    (out / _LOCK).unlink()
    _sync(out.parent)


def _sync(folder: Path) -> None:
    """Waits until the folder's entries are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
