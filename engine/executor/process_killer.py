"""Kills a process on any node of the Ray cluster, so that its memory is freed. Ray itself requests
an exit first, to which a hanging or suspended process does not react for seconds."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

T = TypeVar("T")

_HELPER_S = 20.0
"""How long a helper may take to start on another node, and to kill the process."""
_END_S = 5.0
"""How long the kernel may take to terminate a process, and to free its memory."""
_POLL_S = 0.01


def kill_process(pid: int, node: str) -> None:
    """Kills a process and returns when it has terminated; it need not exist any more. On another
    node, a Ray task does it. Raises a `RayError` if that node runs no task in time."""
    run_on_node(node, _HELPER_S, _kill, pid)


def run_on_node(node: str, limit_s: float, function: Callable[..., T], *args: Any) -> T:
    """Returns `function(*args)`, computed on a node: if it is another one, by a Ray task. Raises a
    `RayError` if that node does not run the task within `limit_s`."""
    if node == ray.get_runtime_context().get_node_id():
        return function(*args)
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    done = (
        _as_task(function)
        .options(scheduling_strategy=strategy, name=function.__name__)
        .remote(*args)
    )
    try:
        result: T = ray.get(done, timeout=limit_s)
    except ray.exceptions.GetTimeoutError:
        ray.cancel(done, force=True)
        raise
    return result


@cache
def _as_task(function: Callable[..., Any]) -> Any:
    return ray.remote(num_cpus=0, max_retries=0)(function)


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
