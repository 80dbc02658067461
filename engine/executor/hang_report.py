"""Saves the state of an engine's processes in a file before those that hang are killed.

The files are in the folder of Ray's logs, on the host of the process that saves them, an engine's
or the manager's: Ray's dashboard shows them, and a collector of Ray's logs finds them.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

import ray

from swell.configs.runtime.flight_recorder import describe_group, group_of, recorder
from swell.configs.runtime.log import StructuredLogger, first_line
from swell.engine.executor.process_killer import run_on_node

_DESCRIBE_S = 5.0
"""How long a host may take to describe its processes."""
_FILES = 20
"""Number of reports that are kept on a host, the newest ones."""
_PATTERN = "swell-hang-*.txt"


class HangReports:
    """The reports of an engine whose workers are processes."""

    def __init__(self, group: str) -> None:
        """`group`: that of the workers, see `FlightRecorder.publish`."""
        self._group = group
        self.newest = ""
        """`HOST:PATH` of the newest file; empty if there is none."""
        self._log = StructuredLogger("engine.executor")
        recorder().publish(group, "engine")

    def save(self, title: str, hanging: Collection[int], nodes: Iterable[str]) -> None:
        """Describes the engine's processes on these nodes. `hanging`: the pids that will be
        killed."""
        self.newest = _save(title, self._group, hanging, nodes)
        self._log.warning("state of the engine is saved", file=self.newest)


def save_report_of_process(title: str, pid: int, node: str) -> str:
    """Describes a process that hangs, and all processes of its group on its node. Returns
    `HOST:PATH` of the file; an empty string if it cannot be written."""
    try:
        group = run_on_node(node, _DESCRIBE_S, group_of, pid)
    except Exception:  # its process is killed without a description
        return ""
    return _save(title, group, [pid], [node]) if group else ""


def _save(title: str, group: str, hanging: Collection[int], nodes: Iterable[str]) -> str:
    parts = [f"{title}\n{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} UTC\n"]
    for node in sorted(set(nodes)):
        try:
            parts.append(run_on_node(node, _DESCRIBE_S, describe_group, group, list(hanging)))
        except Exception as error:  # the process that hangs is replaced without its description
            parts.append(f"== host {node}: its processes cannot be read: {first_line(error)}\n")
    with suppress(Exception):
        path = _write(_folder(), "\n".join(parts))
        return f"{socket.gethostname()}:{path}"
    return ""


def _folder() -> Path:
    return Path(ray._private.worker._global_node.get_logs_dir_path())


def _write(folder: Path, text: str) -> Path:
    """Writes a new file, which only this account can read, and deletes the oldest ones."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    path = folder / f"swell-hang-{stamp}-{time.monotonic_ns()}.txt"
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(text)
    for old in sorted(folder.glob(_PATTERN))[:-_FILES]:
        old.unlink(missing_ok=True)
    return path
