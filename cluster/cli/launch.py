"""`swell serve`: brings a cluster up on this machine or on a running Ray, and takes it down."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

from swell.cluster.api.server_info import START_FAILED
from swell.cluster.cli import ray_settings
from swell.cluster.cli.host_checks import check_hosts
from swell.cluster.control.http_port import ON_INTERFACE, claim_port, with_chosen_port
from swell.cluster.text.model_folder import check
from swell.configs.log import StructuredLogger
from swell.configs.schema import Config, ServeConfig, load

_APP = "swell"
_POLL_S = 0.25
_RAY_LOG_DELAY_S = 0.2
"""How long Ray's messages about the shutdown may take to arrive."""
_SERVE_S = 10.0
"""What Serve itself needs to end replicas."""
_STATUS_S = 10.0
"""How long an ingress may take to answer."""
_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class StartupError(RuntimeError):
    """The cluster did not start; the message is the reason, in one line."""


def serve(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM, then drain and end everything that was started.

    Raises ConfigError and StartupError; nothing is left running then.
    """
    own = {"serve.host": args.host, "serve.port": args.port}
    own = {key: value for key, value in own.items() if value is not None}
    config = load(args.config, {**dict(args.set), **own})
    check(config)
    config = _with_free_port(config, args.address)
    stop = threading.Event()
    _on_signals(lambda *_: stop.set())
    with _ray(args.address):
        _on_signals(lambda *_: stop.set())  # Ray has set its own
        if args.address is not None:
            check_hosts(config)
        with _application(config, own_ray=args.address is None) as ingress:
            host = _wait_until_ready(ingress, stop, config.cluster.start_timeout_s + _SERVE_S)
            if host is not None:
                url = _url(config.serve, host, is_here=args.address is None)
                print(f"ready: {url}", flush=True)
                stop.wait()
            _on_signals(signal.SIG_IGN)
            print("stopping: streams may finish", flush=True)
    return 0


def _with_free_port(config: Config, address: str | None) -> Config:
    """With a port that is free here; whether it is free on the hosts of a Ray that runs elsewhere
    is for `check_hosts`. Raises ConfigError."""
    if address is None:
        return claim_port(config, _node_address() if config.serve.host == ON_INTERFACE else "")
    if config.serve.port:
        return config
    return with_chosen_port(config, "0.0.0.0")


def _node_address() -> str:
    """The address that Ray will give to this host."""
    import ray

    address: str = ray.util.get_node_ip_address()
    return address


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
            num_cpus=ray_settings.local_cpus(),
            include_dashboard=False,
            _temp_dir=folder,
            namespace="swell",
            **quiet,
        )
        ray_settings.protect_token()
        ray_settings.end_idle_daemons()
        yield
    finally:
        with _silenced():
            ray.shutdown()
        if not os.environ.get("SWELL_KEEP_LOGS"):
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _application(config: Config, *, own_ray: bool) -> Iterator[Any]:
    """The Serve application, deployed; the handle of its ingresses.

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
        yield _deploy(config)
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


def _url(serve: ServeConfig, host: str, *, is_here: bool) -> str:
    """Where an ingress answers. `host`: the address of its host; `is_here`: that is this one."""
    shown = serve.host
    if shown == ON_INTERFACE:
        shown = host
    elif shown in _LOOPBACK_OF:
        shown = _LOOPBACK_OF[shown] if is_here else host
    return f"http://[{shown}]:{serve.port}" if ":" in shown else f"http://{shown}:{serve.port}"


def _deploy(config: Config) -> Any:
    """Hand the application to Serve, and do not wait for it: Serve's own wait has no end."""
    from ray import serve

    from swell.cluster.app import application

    print("starting the ingress", flush=True)
    target = serve.RunTarget(application(config), name=_APP, route_prefix="/")
    try:
        (ingress,) = serve.run_many([target], wait_for_applications_running=False)
    except (RuntimeError, TimeoutError) as error:
        raise StartupError(_last_line(str(error))) from error
    return ingress


def _last_line(text: str) -> str:
    """The end of a remote traceback has the error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line]
    return (errors or lines or ["Ray Serve did not start the application"])[-1]


def _wait_until_ready(ingress: Any, stop: threading.Event, limit_s: float) -> str | None:
    """Print what the start waits for until the cluster is ready; the address of an ingress's host
    then. None: stopped meanwhile. Raises StartupError after `limit_s`, or if the start failed.

    The ingresses answer through Ray: this process may run where none of them is reached.
    """
    started, reported = time.monotonic(), ""
    while not stop.is_set():
        reason = _waits_for_serve()
        status = None if reason else _status(ingress)
        if status is not None and status.not_ready is None:
            return str(status.host)
        if status is None:
            reason = reason or "no ingress answers"
        else:
            reason = status.not_ready.reason
            if status.not_ready.code == START_FAILED:
                raise StartupError(reason)
        seconds = time.monotonic() - started
        if seconds > limit_s:
            raise StartupError(
                f"not ready after {seconds:.0f} s (cluster.start_timeout_s): {reason}"
            )
        if reason != reported:
            print(f"[{seconds:5.1f} s] {reason}", file=sys.stderr, flush=True)
            reported = reason
        stop.wait(_POLL_S)
    return None


def _waits_for_serve() -> str | None:
    """What Serve has not done yet; None: all ingresses run. Raises StartupError if it gave up."""
    from ray import serve
    from ray.serve.schema import ApplicationStatus

    found = serve.status().applications.get(_APP)
    if found is None:
        return "Ray Serve begins to start the application"
    if found.status == ApplicationStatus.RUNNING:
        return None
    # The application's own message names the deployments alone.
    messages = [found.message, *(deployment.message for deployment in found.deployments.values())]
    text = "\n".join(filter(None, messages)) or "manager and ingresses are being started"
    if found.status == ApplicationStatus.DEPLOY_FAILED:
        raise StartupError(_last_line(text))
    return _last_line(text)


def _status(ingress: Any) -> Any:
    """The `IngressStatus` of some ingress; None: none answers in time."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    with contextlib.suppress(TimeoutError, RayError, RayServeException):
        return ingress.status.remote().result(timeout_s=_STATUS_S)
    return None
