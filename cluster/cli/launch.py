"""`swell serve`: brings a cluster up on this machine or on a running Ray, and takes it down."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import io
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from swell.cluster.cli import ray_settings
from swell.cluster.control.http_port import claim_port
from swell.cluster.text.model_folder import check
from swell.configs.log import StructuredLogger
from swell.configs.schema import Config, load

_APP = "swell"
_POLL_S = 0.25
_RAY_LOG_DELAY_S = 0.2
"""How long Ray's messages about the shutdown may take to arrive."""
_SERVE_S = 10.0
"""What Serve itself needs to end replicas."""
_LOCAL_CPUS = 16
"""Logical CPUs of a Ray that we start ourselves: our actors reserve next to nothing."""
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""No proxy is between a server and the command that starts it."""


class StartupError(RuntimeError):
    """The cluster did not come up: why, in one line."""


def serve(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM, then drain and end everything that was started.

    Raises ConfigError and StartupError; nothing is left running then.
    """
    own = {"serve.host": args.host, "serve.port": args.port}
    own = {key: value for key, value in own.items() if value is not None}
    config = load(args.config, {**dict(args.set), **own})
    check(config)
    config = claim_port(config)
    stop = threading.Event()
    _on_signals(lambda *_: stop.set())
    with _ray(args.address):
        _on_signals(lambda *_: stop.set())  # Ray has set its own
        with _application(config, own_ray=args.address is None) as url:
            if _wait_until_ready(url, stop):
                print(f"ready: {url}", flush=True)
                stop.wait()
            _on_signals(signal.SIG_IGN)
            print("stopping: streams may finish", flush=True)
    return 0


def _on_signals(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


@contextlib.contextmanager
def _ray(address: str | None) -> Iterator[None]:
    """The Ray cluster at `address`, or one on this machine that leaves no file behind."""
    import ray

    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is not None:
        ray.init(address=address, namespace="swell", **quiet)
        try:
            yield
        finally:
            ray.shutdown()
        return
    ray_settings.set_defaults()
    folder = tempfile.mkdtemp(prefix="swell-", dir="/tmp")
    print("starting Ray on this machine", flush=True)
    try:
        ray.init(
            address="local",
            num_cpus=max(_LOCAL_CPUS, os.cpu_count() or 1),
            include_dashboard=False,
            _temp_dir=folder,
            namespace="swell",
            **quiet,
        )
        ray_settings.end_idle_daemons()
        yield
    finally:
        with _silenced():
            ray.shutdown()
        if not os.environ.get("SWELL_KEEP_LOGS"):
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _application(config: Config, *, own_ray: bool) -> Iterator[str]:
    """The Serve application, deployed; the URL at which it will answer.

    On a Ray of others only our application ends with us: Serve may have more.
    """
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    proxy = config.serve.proxy_port
    serve.start(
        proxy_location="EveryNode" if proxy else "Disabled",
        http_options={"host": config.serve.host, "port": proxy or 8000},
    )
    try:
        _deploy(config)
        host = config.serve.host
        shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        shown = f"[{shown}]" if ":" in shown else shown
        yield f"http://{shown}:{config.serve.port}"
    finally:
        with _silenced():
            serve.delete(_APP, _blocking=False)
            _wait_until_deleted(config)
            if own_ray:
                serve.shutdown()
                time.sleep(_RAY_LOG_DELAY_S)
            else:
                _clean_up_leftovers()


def _wait_until_deleted(config: Config) -> None:
    """As long as the application may take: a drain is longer than Serve waits by itself."""
    from ray import serve

    from swell.cluster.app import shutdown_s

    deadline = time.monotonic() + shutdown_s(config) + _SERVE_S
    while _APP in serve.status().applications and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _clean_up_leftovers() -> None:
    """Usually nothing: the manager has ended all. One that was dead when the application was
    deleted has not, and Serve starts no other."""
    from swell.cluster.control import strays
    from swell.cluster.control.checkpoint_store import CheckpointStore
    from swell.cluster.control.ray_cluster import RayCluster

    async def clean_up() -> None:
        ray, namespace = RayCluster(), f"swell-{_APP}"
        if ended := await strays.end_all(ray, namespace):
            StructuredLogger("cluster.launch").warning("left by a dead manager: ended", names=ended)
        await CheckpointStore(namespace, "", ray).clear()

    asyncio.run(clean_up())


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Ray prints that Serve's controller, which ends itself, was killed: no user needs that."""
    nowhere = io.StringIO()
    with contextlib.redirect_stderr(nowhere), contextlib.redirect_stdout(nowhere):
        yield


def _deploy(config: Config) -> None:
    from ray import serve

    from swell.cluster.app import application

    print("starting the ingress", flush=True)
    try:
        serve.run(application(config), name=_APP, route_prefix="/")
    except RuntimeError as error:
        raise StartupError(_last_line(str(error))) from error


def _last_line(text: str) -> str:
    """The end of a remote traceback has the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line]
    return (errors or lines or ["Ray Serve did not start the application"])[-1]


def _wait_until_ready(url: str, stop: threading.Event) -> bool:
    """Print what the start waits for until the cluster is ready. False: stopped meanwhile."""
    started, reported = time.monotonic(), ""
    while not stop.is_set():
        reason = _not_ready_reason(url)
        if reason is None:
            return True
        if reason != reported:
            seconds = time.monotonic() - started
            print(f"[{seconds:5.1f} s] {reason}", file=sys.stderr, flush=True)
            reported = reason
        stop.wait(_POLL_S)
    return False


def _not_ready_reason(url: str) -> str | None:
    """What is waited for; None: nothing. Raises StartupError if the first start has failed."""
    try:
        with _OPENER.open(f"{url}/ready", timeout=10):
            return None
    except urllib.error.HTTPError as answer:
        error = json.load(answer)["error"]
    except (OSError, http.client.HTTPException):
        return "the ingress does not answer"
    if error["code"] == "cluster_failed":
        raise StartupError(error["message"])
    return str(error["message"])
