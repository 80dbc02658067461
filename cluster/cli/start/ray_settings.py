"""Settings of a Ray cluster that `swell serve` starts, so that it uses little CPU while it is idle.

Ray reads them from the environment of the process that starts it; values that the user has set
stay. Ray's own defaults suit clusters of many nodes and tasks: ours has a handful of actors. How a
death is noticed does not change: a process's socket closes, and Serve's health checks stay.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from pathlib import Path

_SETTINGS = {
    # A replica that does not answer is stopped at once: requests that reach it wait.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # A connection outlasts an outage of a link. There is none on one machine: here it only spares
    # replicas an environment of their own, which Ray would have to make (`replica_options.py`).
    "RAY_grpc_keepalive_timeout_ms": "120000",
    # How often Serve compares what runs with what should. A start takes a few such times: with
    # Ray's 0.1 s it is 1.8 s shorter, and an idle cluster takes 1.6 % of a core more.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    # Ray's own statistics, which have no reader: `/metrics` is ours.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_event_stats_print_interval_ms": "0",
    "RAY_io_context_event_loop_lag_collection_interval_ms": "0",
    "RAY_io_context_monitor_probe_interval_ms": "10000",
    "RAY_task_events_report_interval_ms": "0",
    # How often the node reports what is free on it: its own raylet, which places, knows.
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "5000",
    "RAY_report_worker_backlog_interval_ms": "5000",
    # Housekeeping of objects, of which we have none.
    "RAY_object_manager_timer_freq_ms": "10000",
    "RAY_free_objects_period_milliseconds": "5000",
    "RAY_raylet_check_gc_period_milliseconds": "5000",
    "RAY_local_fs_monitor_interval_ms": "5000",
    "RAY_memory_monitor_refresh_ms": "2000",
    "RAY_core_worker_internal_heartbeat_ms": "5000",
}

_LEAST_CPUS = 16
_OTHERS = 0o077
"""Rights of other accounts, in a file's mode."""


def local_cpus() -> int:
    """Logical CPUs of a Ray that we start ourselves: our actors reserve next to nothing."""
    return max(_LEAST_CPUS, os.cpu_count() or 1)


def set_defaults(start_s: float) -> None:
    """Set variables that the user has not set, and take Ray's token away from other accounts. Call
    it before `ray.init`. `start_s`: how long Ray's GCS may take to start."""
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", str(int(start_s)))
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    protect_token()


def protect_token() -> None:
    """Make Ray's token a file that no other account reads: Ray would write one for everybody,
    and to take it away afterwards is too late."""
    environment = os.environ
    if environment.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    if environment.get("RAY_AUTH_TOKEN"):
        return
    named = environment.get("RAY_AUTH_TOKEN_PATH")
    # There may be no home, or nothing can be written there, or it is somebody else's.
    with contextlib.suppress(OSError, RuntimeError):
        token = Path(named) if named else Path.home() / ".ray" / "auth_token"
        if not named and not token.exists():
            _make_token(token)
        if token.stat().st_mode & _OTHERS:
            token.chmod(0o600)


def _make_token(token: Path) -> None:
    """The file appears whole: another start may read it."""
    token.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, own = tempfile.mkstemp(dir=token.parent)  # mode 600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(own, token)
    finally:
        os.unlink(own)


def end_idle_daemons() -> None:
    """End three of Ray's processes that `ray.init` always starts, and that have no use here: one
    tails log files for drivers that want them, one scales nodes, one is the server of the
    dashboard, without its pages. Call it after `ray.init`."""
    from ray._private import worker

    node = worker._global_node
    for name in ("kill_log_monitor", "kill_monitor", "kill_dashboard"):
        kill = getattr(node, name, None)  # of no public interface: another Ray may lack it
        if kill is not None:
            kill()
