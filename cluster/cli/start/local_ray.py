"""A Ray cluster on this machine for the duration of one `swell serve`."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from swell.cluster.cli.start import ray_leftovers, ray_settings
from swell.cluster.cli.start.ray_leftovers import continued
from swell.cluster.cli.start.ray_processes import RayProcesses
from swell.cluster.cli.start.start_reasons import StartupError, last_line
from swell.cluster.cli.start.start_screen import StartScreen
from swell.configs.runtime.hanging_calls import within
from swell.configs.runtime.log import StructuredLogger

_QUICK_S = 20.0
"""A start that fails sooner did not fail for lack of time."""
_MAX_QUICK_FAILURES = 2
_BETWEEN_S = 1.0
_SHUTDOWN_S = 30.0
"""How long `ray.shutdown` may take to stop Ray, on a busy machine too."""
_LOST_SHUTDOWN_S = 2.0
"""How long `ray.shutdown` may take after Ray itself has stopped."""
_LEFT_S = 5.0
"""How long Ray's processes may take to exit after Ray has stopped."""
_NEVER_LATER = (ValueError, TypeError, PermissionError, FileNotFoundError, NotADirectoryError)
"""Errors that a second attempt would raise as well."""
_REMEDY = (
    "free processors and memory (swell doctor shows them), raise cluster.start_timeout_s, or "
    "start Ray yourself (ray start --head) and set --address; with SWELL_KEEP_LOGS=1 its logs "
    "stay in /tmp/swell-*"
)


@contextlib.contextmanager
def local_ray(
    folder: Path,
    screen: StartScreen,
    stop: threading.Event,
    limit_s: float,
    take_signals: Callable[[], None],
) -> Iterator[RayProcesses]:
    """Starts Ray with its files in `folder`, and stops it afterwards. `stop` is set when the end
    begins, and at the latest when this context exits. `take_signals`: called after each attempt,
    because Ray sets its own signal handlers. Raises StartupError after `limit_s`."""
    ray_settings.set_defaults(limit_s)
    processes = RayProcesses()
    with continued(folder, stop):
        try:
            _start(processes, folder, screen, stop, limit_s, take_signals)
            yield processes
        finally:
            stop.set()
            _end(processes)
            if left := ray_leftovers.end_all(folder, _LEFT_S):
                StructuredLogger("cluster.launch").warning("left by Ray: killed", pids=left)


def _end(processes: RayProcesses) -> None:
    """Stops Ray and disconnects from it: in order, or by SIGKILL after a time limit."""
    import ray

    if not processes.has_lost_one():
        with contextlib.suppress(TimeoutError):
            within(_SHUTDOWN_S, ray.shutdown)
            return
    processes.end()
    try:
        within(_LOST_SHUTDOWN_S, ray.shutdown)  # by itself it waits a minute for its GCS
    except TimeoutError:
        processes.is_client_left = True


def _start(
    processes: RayProcesses,
    folder: Path,
    screen: StartScreen,
    stop: threading.Event,
    limit_s: float,
    take_signals: Callable[[], None],
) -> None:
    import ray

    began_s = time.monotonic()
    deadline_s = began_s + limit_s
    quick_failures, attempts = 0, 0
    while not stop.is_set():
        attempt_s = time.monotonic()
        attempts += 1
        try:
            with processes.recorded(lambda: 0.0 if stop.is_set() else deadline_s):
                _init(folder)
                processes.gcs_address = ray.get_runtime_context().gcs_address
            return
        except SystemExit:  # SIGTERM, from Ray's own handler
            _end_failed(processes)
            stop.set()
        except Exception as error:
            _end_failed(processes)
            now_s = time.monotonic()
            quick_failures += now_s - attempt_s < _QUICK_S
            is_last = isinstance(error, _NEVER_LATER) or quick_failures >= _MAX_QUICK_FAILURES
            if not stop.is_set() and (is_last or now_s > deadline_s):
                times = "1 attempt" if attempts == 1 else f"{attempts} attempts"
                raise StartupError(
                    f"Ray did not start on this machine ({times}, {now_s - began_s:.0f} s of "
                    f"cluster.start_timeout_s={limit_s:g}): {last_line(str(error))}; {_REMEDY}"
                ) from error
            screen.state(f"Ray did not start, attempt {attempts + 1}: {last_line(str(error))}")
        finally:
            take_signals()
        stop.wait(_BETWEEN_S)


def _init(folder: Path) -> None:
    import ray

    ray.init(
        address="local",
        num_cpus=ray_settings.local_cpus(),
        include_dashboard=False,
        _temp_dir=str(folder),
        namespace="swell",
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    ray_settings.protect_token()
    ray_settings.end_idle_daemons()


def _end_failed(processes: RayProcesses) -> None:
    import ray

    processes.end()
    ray.shutdown()
