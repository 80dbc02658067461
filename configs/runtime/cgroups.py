"""Reads the limits of memory and CPU time that control groups (`cgroup`, versions 1 and 2) set for
this process. A container sees the host's `/proc/meminfo` and processors, and has these limits.

A limit applies to a group and to all groups below it, so the tightest one of this process's group
and its parents counts. Each function accepts the folder that stands for `/`. A file that is missing
or damaged sets no limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")
_NO_LIMIT_BYTES = 2**60
"""Larger values mean no limit: version 1 writes the largest number of pages then."""
_MAX_FILE_BYTES = 2**20
"""Maximum size of a kernel file that is read."""


class MemoryLimit(NamedTuple):
    limit_bytes: int
    available_bytes: int
    """Bytes that the group may still allocate: its page cache counts as free, as in
    MemAvailable."""
    source: str
    """The file that sets the limit."""


class CpuQuota(NamedTuple):
    cores: float
    """Seconds of CPU time per second."""
    source: str


class _Group(NamedTuple):
    version: int
    folder: Path


def memory_limit(root: Path = ROOT) -> MemoryLimit | None:
    """Returns the limit that leaves the least memory, or None if there is no limit."""
    found = [limit for group in _groups("memory", root) for limit in _memory_limits(group)]
    if not found:
        return None
    least = min(found, key=lambda limit: limit.available_bytes)
    return least._replace(source=_shown(least.source, root))


def cpu_quota(root: Path = ROOT) -> CpuQuota | None:
    """Returns the smallest quota, or None if there is no quota."""
    found = [quota for group in _groups("cpu", root) if (quota := _quota(group))]
    if not found:
        return None
    least = min(found, key=lambda quota: quota.cores)
    return least._replace(source=_shown(least.source, root))


def _memory_limits(group: _Group) -> Iterator[MemoryLimit]:
    """Yields the memory limits of one group. Above `memory.high` the kernel throttles a group;
    above the others it kills processes."""
    folder = group.folder
    names, used_name, prefix = ["memory.max", "memory.high"], "memory.current", ""
    if group.version == 1:
        names, used_name, prefix = ["memory.limit_in_bytes"], "memory.usage_in_bytes", "total_"
    used = _number(_read(folder / used_name)) or 0
    cached = _cached_bytes(folder / "memory.stat", prefix)
    for name in names:
        limit = _number(_read(folder / name))
        if limit is not None and limit < _NO_LIMIT_BYTES:
            available = max(0, limit - max(0, used - cached))
            yield MemoryLimit(limit, available, str(folder / name))


def _cached_bytes(file: Path, prefix: str) -> int:
    """Returns the bytes of cached files, which the kernel drops when it needs memory."""
    names = (f"{prefix}active_file", f"{prefix}inactive_file")
    lines = (line.partition(" ") for line in _read(file).splitlines())
    return sum(_number(value) or 0 for name, _, value in lines if name in names)


def _quota(group: _Group) -> CpuQuota | None:
    if group.version == 1:
        file = group.folder / "cpu.cfs_quota_us"
        quota, period = _read(file), _read(group.folder / "cpu.cfs_period_us")
    else:
        file = group.folder / "cpu.max"
        quota, _, period = _read(file).strip().partition(" ")
    quota_us, period_us = _number(quota), _number(period)
    if not quota_us or not period_us:
        return None
    return CpuQuota(quota_us / period_us, str(file))


def _groups(controller: str, root: Path) -> Iterator[_Group]:
    """Yields the group of this process that has the controller, and its parents as far as they are
    mounted. A controller in a version 1 tree is not in the version 2 tree."""
    own = [line.split(":", 2) for line in _read(root / "proc/self/cgroup").splitlines()]
    paths = {name: fields[2] for fields in own if len(fields) == 3 for name in fields[1].split(",")}
    mounts = list(_mounts(root))
    for version, name in ((1, controller), (2, "")):
        for kind, controllers, top, folder in mounts:
            if kind == version and (version == 2 or controller in controllers) and name in paths:
                yield from _up(version, paths[name], top, root / folder.lstrip("/"))
                return


def _up(version: int, path: str, top: str, folder: Path) -> Iterator[_Group]:
    """Yields the group at `path` and its parents. `top` is the group that is mounted at `folder`.
    If `path` is not below `top`, it is outside of this process's namespace, and only `folder` is
    used."""
    try:
        below = PurePosixPath(path).relative_to(top)
    except ValueError:
        below = PurePosixPath()
    if ".." in below.parts:
        below = PurePosixPath()
    for part in (below, *below.parents):
        yield _Group(version, folder / part)


def _mounts(root: Path) -> Iterator[tuple[int, list[str], str, str]]:
    """Yields version, controllers, mounted group and folder of each tree (see `man 5
    proc_pid_mountinfo`)."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, *rest) = left.split(), (right.split() or [""])
        if len(fields) >= 5 and len(rest) >= 2 and kind in ("cgroup", "cgroup2"):
            version = 1 if kind == "cgroup" else 2
            yield version, rest[1].split(","), _unescaped(fields[3]), _unescaped(fields[4])


def _unescaped(text: str) -> str:
    """Decodes octal escapes: the kernel writes a blank as `\\040`."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _read(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return stream.read(_MAX_FILE_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return ""


def _number(text: str) -> int | None:
    """Parses a number; returns None for `max`, -1 and anything else that is not a number."""
    text = text.strip()
    return int(text) if re.fullmatch(r"[0-9]{1,20}", text) else None


def _shown(file: str, root: Path) -> str:
    return "/" + str(Path(file).relative_to(root))
