"""A private folder in a place where other accounts can write too, such as /tmp: files and folders
of other accounts are refused.

All access goes through a descriptor of the folder, so that nobody can replace it in between.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_OTHERS_WRITE = 0o022


@contextmanager
def enter_folder(path: Path, *, make: bool = False) -> Iterator[int]:
    """Opens a folder in which only this account can write, and yields its descriptor. With `make`,
    creates the folder with mode 0700 if it is missing. Raises OSError."""
    if make:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(folder)
        if found.st_mode & _OTHERS_WRITE:
            raise PermissionError(
                f"{path} has the mode {stat.S_IMODE(found.st_mode) & 0o777:o}: other accounts can "
                "write there, so its contents are not trusted; remove it, or run chmod 700 on it"
            )
        _check_owner(found, _own_uid(folder), str(path))
        yield folder
    finally:
        os.close(folder)


@contextmanager
def open_file(folder: int, name: str) -> Iterator[BinaryIO]:
    """Opens a regular file of this account in such a folder. Raises OSError."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, dir_fd=folder), "rb") as file:
        check_file(folder, os.fstat(file.fileno()), name)
        yield file


def create_file(folder: int, name: str) -> int:
    """Creates a file and returns a descriptor to write to. Raises OSError if the name exists."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, 0o600, dir_fd=folder)


def check_file(folder: int, found: os.stat_result, name: str) -> None:
    """Raises PermissionError unless this is a regular file of the owner of its folder."""
    if not stat.S_ISREG(found.st_mode):
        raise PermissionError(f"{name} is not a regular file")
    _check_owner(found, os.fstat(folder).st_uid, name)


def _check_owner(found: os.stat_result, uid: int, name: str) -> None:
    if found.st_uid != uid:
        raise PermissionError(
            f"{name} belongs to the account {found.st_uid}, but this process writes there as "
            f"{uid}; remove it, or set another folder"
        )


def _own_uid(folder: int) -> int:
    """Returns the uid that files of this process get in the folder: a file server may map root to
    another account."""
    own = os.geteuid()
    if os.fstat(folder).st_uid == own:
        return own
    name = f".{secrets.token_hex(16)}"
    probe = create_file(folder, name)
    try:
        return os.fstat(probe).st_uid
    finally:
        os.close(probe)
        os.unlink(name, dir_fd=folder)
