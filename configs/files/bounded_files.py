"""Reads files that other people or programs wrote, and parses JSON of such files. No file is read
beyond a size limit. Devices, FIFOs and files of the kernel (`/proc`) are refused, because reading
them may never end."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_CONFIG_BYTES = 8 * 2**20
"""Limit for config.json and similar files: one that lists the quantized modules has some 100 KB."""
MAX_INDEX_BYTES = 64 * 2**20
"""Limit for a checkpoint's index of shards: that of the largest models has some 20 MB."""
MAX_TEXT_FILE_BYTES = 512 * 2**20
"""Limit for a tokenizer's file: that of a large vocabulary has 40 MB."""
_CHUNK_BYTES = 2**20


def read_file(path: Path, limit_bytes: int) -> bytes:
    """Reads a regular file. Raises OSError, also if the file is longer than the limit."""
    return b"".join(_chunks(path, limit_bytes))


def digest_file(path: Path, limit_bytes: int, digest_bytes: int) -> str:
    """Returns the digest of a regular file without holding it in memory. Raises OSError."""
    digest = hashlib.blake2b(digest_size=digest_bytes)
    for chunk in _chunks(path, limit_bytes):
        digest.update(chunk)
    return digest.hexdigest()


def open_regular(path: Path) -> int:
    """Opens a regular file and returns its descriptor. Raises OSError. Opens no other file: a
    fifo would block until it has a writer, and opening a device may have effects. The file
    systems of the kernel are those of size 0."""
    found = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if os.fstat(found).st_size == 0 and os.fstatvfs(found).f_blocks == 0:
            why = "not a regular file: its contents are made by the kernel"
            raise OSError(errno.EINVAL, why, str(path))
        return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(found)


def _chunks(path: Path, limit_bytes: int) -> Iterator[bytes]:
    descriptor = open_regular(path)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        size = os.fstat(descriptor).st_size
        count = 0
        while size <= limit_bytes and (chunk := file.read(_CHUNK_BYTES)):
            count += len(chunk)
            size = max(size, count)
            if size <= limit_bytes:
                yield chunk
    if size > limit_bytes:
        why = f"it has {size} bytes; the limit is {limit_bytes}"
        raise OSError(errno.EFBIG, why, str(path))


def parse_json(text: str | bytes) -> Any:
    """Parses JSON. Raises ValueError if the text is not JSON or is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its objects and arrays are nested too deeply") from None
