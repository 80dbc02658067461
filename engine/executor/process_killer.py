"""Ends a process of any node of the Ray cluster, so that its memory is free: Ray requests its exit
first, and a process that hangs or is suspended does not react for seconds."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_HELPER_S = 20.0
"""How long a helper may take to start on another node, and to end the process."""
_END_S = 5.0
"""How long the kernel may take to end a process, and to free its memory."""
_POLL_S = 0.01


def kill_process(pid: int, node: str) -> None:
    """Return when it has ended; one that had ended before is no error. On another node than this
    one a task does it there. Raises a `RayError` if that node runs none in time."""
    if node == ray.get_runtime_context().get_node_id():
        _kill(pid)
        return
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    done = _HELPER.options(scheduling_strategy=strategy, name="kill_process").remote(pid)
    try:
        ray.get(done, timeout=_HELPER_S)
    except ray.exceptions.GetTimeoutError:
        ray.cancel(done, force=True)
        raise


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _END_S
    while _is_running(pid) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _is_running(pid: int) -> bool:
    """A zombie holds no memory."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


_HELPER: Any = ray.remote(num_cpus=0, max_retries=0)(_kill)
