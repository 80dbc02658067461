"""Kills a process on any node of the Ray cluster, so that its memory is freed. Ray itself requests
an exit first, to which a hanging or suspended process does not react for seconds."""

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
"""How long a helper may take to start on another node, and to kill the process."""
_END_S = 5.0
"""How long the kernel may take to terminate a process, and to free its memory."""
_POLL_S = 0.01


def kill_process(pid: int, node: str) -> None:
    """Kills a process and returns when it has terminated; it need not exist any more. On another
    node, a Ray task does it. Raises a `RayError` if that node runs no task in time."""
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
    """Whether the process exists. A zombie does not count, because it holds no memory."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


_HELPER: Any = ray.remote(num_cpus=0, max_retries=0)(_kill)
