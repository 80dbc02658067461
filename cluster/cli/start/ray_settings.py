"""Settings of a Ray cluster that `swell serve` starts, so that it uses little CPU while idle.

Ray reads them from the environment of the process that starts it; values that the user has set are
kept. Ray's defaults suit clusters of many nodes and tasks, but ours has only a few actors. Deaths
are detected as before: the socket of a process closes, and Serve's health checks stay.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from pathlib import Path

_SETTINGS = {
    # Stop a replica that does not answer at once, because requests that reach it wait.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # Let a connection outlast an outage of a link. This does not matter on one machine; it only
    # spares replicas a runtime environment, which Ray would have to create (`replica_options`).
    "RAY_grpc_keepalive_timeout_ms": "120000",
    # Interval at which Serve compares actual and target state. A start takes a few intervals: with
    # Ray's 0.1 s it is 1.8 s faster, but an idle cluster uses another 1.6 % of a core.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    # Ray's own statistics, which nobody reads: `/metrics` has ours.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_event_stats_print_interval_ms": "0",
    "RAY_io_context_event_loop_lag_collection_interval_ms": "0",
    "RAY_io_context_monitor_probe_interval_ms": "10000",
    "RAY_task_events_report_interval_ms": "0",
    # Interval at which a node reports its free resources: its own raylet, which places actors,
    # knows them anyway.
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "5000",
    "RAY_report_worker_backlog_interval_ms": "5000",
    # Housekeeping of objects, which this cluster does not use.
    "RAY_object_manager_timer_freq_ms": "10000",
    "RAY_free_objects_period_milliseconds": "5000",
    "RAY_raylet_check_gc_period_milliseconds": "5000",
    "RAY_local_fs_monitor_interval_ms": "5000",
    "RAY_memory_monitor_refresh_ms": "2000",
    "RAY_core_worker_internal_heartbeat_ms": "5000",
}

_LEAST_CPUS = 16
_OTHERS = 0o077
"""Permissions of other accounts in a file mode."""


def local_cpus() -> int:
    """Returns the logical CPUs of a Ray that we start: our actors reserve almost none."""
    return max(_LEAST_CPUS, os.cpu_count() or 1)


def set_defaults(start_s: float) -> None:
    """Sets variables that the user has not set, and makes Ray's token private. Call this before
    `ray.init`. `start_s`: how long Ray's GCS may take to start."""
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", str(int(start_s)))
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    protect_token()


def protect_token() -> None:
    """Makes Ray's token a file that other accounts cannot read. Ray would write a public one, and
    restricting it afterwards is too late."""
    environment = os.environ
    if environment.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    if environment.get("RAY_AUTH_TOKEN"):
        return
    named = environment.get("RAY_AUTH_TOKEN_PATH")
    # There may be no home, or it cannot be written, or it belongs to another account.
    with contextlib.suppress(OSError, RuntimeError):
        token = Path(named) if named else Path.home() / ".ray" / "auth_token"
        if not named and not token.exists():
            _make_token(token)
        if token.stat().st_mode & _OTHERS:
            token.chmod(0o600)


def _make_token(token: Path) -> None:
    """Writes the file atomically: another start may read it."""
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
    """Kills three of Ray's processes that `ray.init` always starts and that are useless here: one
    tails log files for drivers, one scales nodes, one serves the dashboard, without its pages. Call
    this after `ray.init`."""
    from ray._private import worker

    node = worker._global_node
    for name in ("kill_log_monitor", "kill_monitor", "kill_dashboard"):
        kill = getattr(node, name, None)  # not a public interface: another Ray release may lack it
        if kill is not None:
            kill()
