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

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_NAME = "swell-memory"
_LINK = re.compile(rf"/memfd:{_NAME}:([0-9a-f]+)-([0-9a-f]+)( \(deleted\))?")
_ENTRY_BYTES = 8
_NOT_WRITTEN = bytes(flags for flags in range(256) if not flags & 0xC0)
"""The last byte of the entry of a page that is neither in memory nor swapped out."""
_READ_BYTES = 2**20


def announce(start: int, num_bytes: int) -> int:
    """Announces that this process will write the range of addresses from `start` on. Returns a
    descriptor; the announcement ends when it is closed. Raises `OSError`."""
    return os.memfd_create(f"{_NAME}:{start:x}-{start + num_bytes:x}")


def promised_bytes(root: Path) -> int:
    """Returns how many announced bytes the kernel has not allocated yet. `root`: the folder that
    stands for `/`."""
    with contextlib.suppress(OSError):
        processes = [each for each in (root / "proc").iterdir() if each.name.isdecimal()]
        return sum(map(promised_by, processes))
    return 0


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
    tell."""
    first, last = start // _PAGE_BYTES, -(-end // _PAGE_BYTES)
    left, pages = (last - first) * _ENTRY_BYTES, 0
    with contextlib.suppress(OSError), pagemap.open("rb", buffering=0) as file:
        file.seek(first * _ENTRY_BYTES)
        while left > 0 and (read := file.read(min(left, _READ_BYTES))):
            left -= len(read)
            pages += len(read[_ENTRY_BYTES - 1 :: _ENTRY_BYTES].translate(None, _NOT_WRITTEN))
    return min(pages * _PAGE_BYTES, end - start)
