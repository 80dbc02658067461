"""Files of folders that others have filled: none is read further than it may be long, and none that
has no end or keeps its reader waiting, such as a device or a fifo."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

MAX_CONFIG_BYTES = 8 * 2**20
"""Of config.json and its like: those that list the quantized modules have some 100 KB."""
MAX_INDEX_BYTES = 64 * 2**20
"""Of a checkpoint's list of shards: those of the largest models have some 20 MB."""
MAX_TEXT_FILE_BYTES = 512 * 2**20
"""Of a tokenizer's file: those of large vocabularies have 40 MB."""
_CHUNK_BYTES = 2**20


def read_file(path: Path, limit_bytes: int) -> bytes:
    """All of a regular file. Raises OSError, also where it is longer."""
    return b"".join(_chunks(path, limit_bytes))


def digest_file(path: Path, limit_bytes: int, digest_bytes: int) -> str:
    """The digest of a regular file, which is not held in memory. Raises OSError."""
    digest = hashlib.blake2b(digest_size=digest_bytes)
    for chunk in _chunks(path, limit_bytes):
        digest.update(chunk)
    return digest.hexdigest()


def open_regular(path: Path) -> int:
    """A descriptor of a regular file. Raises OSError, and waits for nobody."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
    return descriptor


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
        raise OSError(f"{path} has {size} bytes; at most {limit_bytes} are read")
