"""A file of an untrusted folder is read within bounds, or refused with a reason."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from swell.configs.files.bounded_files import digest_file, read_file

LIMIT = 1000


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for size in (0, 1, LIMIT):
        path.write_bytes(b"a" * size)
        assert read_file(path, LIMIT) == b"a" * size
        assert digest_file(path, LIMIT, 8) == digest_file(path, LIMIT + 1, 8)
    (tmp_path / "link").symlink_to(path)
    assert read_file(tmp_path / "link", LIMIT) == b"a" * LIMIT


@pytest.mark.parametrize("read", [read_file, lambda path, limit: digest_file(path, limit, 8)])
def test_large_files_and_special_files_are_refused(tmp_path: Path, read) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(OSError, match=rf"{2**40} bytes.*{LIMIT}"):
        read(large, LIMIT)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("fifo", "zero", "."):
        with pytest.raises(OSError, match="not a regular file"):
            read(tmp_path / name, LIMIT)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none", LIMIT)


@pytest.mark.parametrize("target", ["/proc/version", "/proc/kmsg", "/proc/self/mem"])
def test_files_of_the_kernel_are_refused_without_being_opened(tmp_path: Path, target: str) -> None:
    """Files of the kernel have size 0, and a read of `/proc/kmsg` waits for messages."""
    (tmp_path / "link").symlink_to(target)
    opened: list[str] = []
    sys.addaudithook(lambda name, args: opened.append(str(args[0])) if name == "open" else None)
    with pytest.raises(OSError, match="contents are made by the kernel"):
        read_file(tmp_path / "link", LIMIT)
    assert not [one for one in opened if one.startswith("/proc/self/fd/")]


def test_a_growing_file_is_read_up_to_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a" * (LIMIT + 1))
    small = os.stat_result([*os.stat(path)[:6], 1, 0, 0, 0])
    monkeypatch.setattr(os, "fstat", lambda _: small)
    with pytest.raises(OSError, match=str(LIMIT)):
        read_file(path, LIMIT)
