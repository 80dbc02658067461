"""The folder of one `swell serve`, which holds Ray's session and is removed when its owner exits.

    /tmp/swell-XXXX / owner      locked by the process that made the folder, for as long as it lives
                    / session_*  Ray's

The kernel releases the lock when the owning process exits, even if it was killed and could not
clean up. The next start removes folders whose lock is free, unless a process still uses one. A
folder without `owner` is still being created, or is not ours.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PARENT = Path("/tmp")
_PREFIX = "swell-"
_OWNER = "owner"


@contextlib.contextmanager
def session_folder(*, keep: bool = False, parent: Path = _PARENT) -> Iterator[str]:
    """Creates a folder for the duration of the context. `keep`: the folder and its logs stay."""
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    lock = os.open(path / f"{_OWNER}.new", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not keep:
            os.rename(path / f"{_OWNER}.new", path / _OWNER)  # locked before others find it
        yield str(path)
    finally:
        if not keep:
            shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def remove_abandoned(parent: Path = _PARENT) -> list[Path]:
    """Removes folders of this user whose owner has died. Returns them."""
    removed: list[Path] = []
    used: set[str] | None = None
    for path in sorted(parent.glob(f"{_PREFIX}*")):
        with _owned_lock(path) as is_free:
            if not is_free:
                continue
            used = _paths_in_use(f"{parent}/{_PREFIX}") if used is None else used
            if not any(text == str(path) or text.startswith(f"{path}/") for text in used):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
    return removed


@contextlib.contextmanager
def _owned_lock(path: Path) -> Iterator[bool]:
    """Yields whether the folder is ours and its owner is dead; holds its lock meanwhile."""
    try:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise OSError
        lock = os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(lock)


def _paths_in_use(start: str) -> set[str]:
    """Returns the paths with this prefix in the arguments and open files of visible processes:
    Ray's may live a moment longer than their owner."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            arguments = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            found |= {start + part for text in arguments for part in _behind(text, start)}
            if int(process.name) == os.getpid():
                continue  # this process holds the lock itself
            for file in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if (target := os.readlink(file)).startswith(start):
                        found.add(target)
    return found


def _behind(text: str, start: str) -> list[str]:
    """Returns the rest of each path in a text, as in `--session=/tmp/swell-1/session,x`."""
    return [part.split(",")[0].split(" ")[0] for part in text.split(start)[1:]]
