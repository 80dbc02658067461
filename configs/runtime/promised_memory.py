"""Memory that processes of this machine have reserved and have not written yet.

The kernel allocates a page when it is first written, and counts all other pages as free. So a
process announces the ranges of addresses that it will write: it opens a file in memory, without
content, whose name contains the range. Other processes find the name among the open files of the
process, and the written pages in its page map. An announcement ends with its process.

Processes of other accounts and of other containers are not seen.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_NAME = "swell-memory"
_LINK = re.compile(rf"/memfd:{_NAME}:([0-9a-f]+)-([0-9a-f]+)( \(deleted\))?")
_MFD_NOEXEC_SEAL = 0x8
_ENTRY_BYTES = 8
_NOT_WRITTEN = bytes(flags for flags in range(256) if not flags & 0xC0)
"""The last byte of the entry of a page that is neither in memory nor swapped out."""
_READ_BYTES = 2**20


def announce(start: int, num_bytes: int) -> int:
    """Announces that this process will write the range of addresses from `start` on. Returns a
    descriptor; the announcement ends when it is closed. Raises `OSError`."""
    name = f"{_NAME}:{start:x}-{start + num_bytes:x}"
    try:  # some systems refuse files that could be executed
        return os.memfd_create(name, os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    except OSError:  # older than Linux 6.3
        return os.memfd_create(name)


class Promised(NamedTuple):
    """Announced bytes that the kernel has not allocated yet."""

    of_all: int
    of_group: int
    """Without processes of other control groups than this one's."""


def promised_bytes(root: Path) -> Promised:
    """Returns what the processes of the machine have promised. `root`: the folder that stands for
    `/`."""
    of_all = of_group = 0
    own_group = _group_of(root / "proc/self")
    with contextlib.suppress(OSError):
        for process in (root / "proc").iterdir():
            if process.name.isdecimal() and (promised := promised_by(process)):
                of_all += promised
                of_group += promised * (_group_of(process) == own_group)
    return Promised(of_all, of_group)


def _group_of(process: Path) -> str:
    """Returns the control groups of a process, as the kernel writes them."""
    with contextlib.suppress(OSError):
        return (process / "cgroup").read_text()
    return ""


def promised_by(process: Path) -> int:
    """Returns the bytes that one process has announced and not written. `process`: its folder in
    `/proc`."""
    return sum(
        end - start - _written_bytes(process / "pagemap", start, end)
        for start, end in _announced(process)
    )


def _announced(process: Path) -> Iterator[tuple[int, int]]:
    """Yields the ranges of addresses that a process has announced."""
    links = []
    with contextlib.suppress(OSError):  # it has ended, or belongs to another account
        for file in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # it has just been closed
                links.append(os.readlink(file))
    for link in links:
        if found := _LINK.fullmatch(link):
            yield int(found[1], 16), int(found[2], 16)


def _written_bytes(pagemap: Path, start: int, end: int) -> int:
    """Returns how many bytes of a range of addresses the kernel has allocated; 0 if it does not
    tell; all of them if the process has just given its memory back."""
    first, last = start // _PAGE_BYTES, -(-end // _PAGE_BYTES)
    left, pages = (last - first) * _ENTRY_BYTES, 0
    with contextlib.suppress(OSError), pagemap.open("rb", buffering=0) as file:
        file.seek(first * _ENTRY_BYTES)
        while left > 0:
            read = file.read(min(left, _READ_BYTES))
            if not read:
                return end - start
            left -= len(read)
            pages += len(read[_ENTRY_BYTES - 1 :: _ENTRY_BYTES].translate(None, _NOT_WRITTEN))
    return min(pages * _PAGE_BYTES, end - start)
