"""`swell serve`: starts a cluster on this machine or on a running Ray, and stops it."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from swell.cluster.api.server.api_keys import key_file_warnings
from swell.cluster.api.server.http_server import fd_warning
from swell.cluster.api.server_info import START_FAILED
from swell.cluster.cli.session_folder import remove_abandoned, session_folder
from swell.cluster.cli.start.application import APP, SERVE_S, Stopped, application
from swell.cluster.cli.start.hub_model import Download, ask_hub
from swell.cluster.cli.start.local_ray import local_ray
from swell.cluster.cli.start.private_home import check_temporary_files, use_private_files
from swell.cluster.cli.start.ray_address import probe_address
from swell.cluster.cli.start.ray_processes import RayProcesses
from swell.cluster.cli.start.start_reasons import StartupError, last_line, waiting_reason
from swell.cluster.cli.start.start_screen import StartScreen, explanation, own_lines_only
from swell.cluster.control.ray.http_port import (
    ON_INTERFACE,
    claim_port,
    listening_host,
    with_chosen_port,
)
from swell.cluster.port_claim import PortClaim, PortClaims
from swell.cluster.text.model_check import check
from swell.configs.files.gguf.unpacked import remove_unused
from swell.configs.runtime.nccl import check_nccl
from swell.configs.schema import Config, ConfigError, ServeConfig, load
from swell.engine.serving.start_timeline import StartPhase, StartTimeline

_POLL_S = 0.25
_STATUS_S = 10.0
"""How long an ingress may take to answer."""
_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def serve(args: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM, then drains and stops everything that was started.

    Raises ConfigError and StartupError; then nothing is left running.
    """
    timeline = StartTimeline("configuration", time.monotonic)
    own = {"serve.host": args.host, "serve.port": args.port}
    own = {key: value for key, value in own.items() if value is not None}
    config = load(args.config, {**dict(args.set), **own})
    check(config)
    for warning in key_file_warnings(config.serve):
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    download = Download()
    if args.address is not None:
        probe_address(args.address)
    else:
        check_temporary_files()
        _check_device(config)
        check_nccl(config)
        if (too_few := fd_warning(config.serve)) is not None:
            _print(f"warning: {too_few}")
        download = ask_hub(config, _print)
    stop = threading.Event()

    def take_signals() -> None:
        _on_signals(lambda *_: stop.set())

    take_signals()
    ended_before_us, started = False, RayProcesses()
    limit_s = config.cluster.start_timeout_s
    timeline.enter("Ray")
    with (
        _claimed_port(config, args.address) as (config, claim),
        _files() as folder,
        own_lines_only(folder / "swell-serve.log", timeline) as screen,
        contextlib.suppress(Stopped),
        _ray(args.address, folder, screen, stop, limit_s, take_signals) as processes,
    ):
        take_signals()  # Ray has set its own signal handlers
        started = processes
        if not stop.is_set():  # otherwise Ray may not run, and a call would start another one
            if claim is not None:
                _share_with_ingresses(claim)
            _serve_until(stop, config, args, screen, processes, download)
        ended_before_us = processes.has_lost_one()
    if ended_before_us or started.is_client_left:
        _exit_at_once()
    return 0


def _exit_at_once() -> NoReturn:
    """Exits without the exit handlers of libraries: Ray's would wait a minute for a GCS that has
    exited."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(0)


def _print(text: str) -> None:
    print(text, flush=True)


def _check_device(config: Config) -> None:
    """Raises ConfigError if engines need GPUs and Ray will find none here."""
    if config.model.device != "cuda":
        return
    from ray._private.accelerators import get_accelerator_manager_for_resource

    gpus = get_accelerator_manager_for_resource("GPU")
    visible = gpus.get_current_process_visible_accelerator_ids()  # CUDA_VISIBLE_DEVICES
    if not gpus.get_current_node_num_accelerators() or visible == []:
        raise ConfigError(
            "model.device=cuda, but the driver shows no GPU on this machine; set "
            "model.device=cpu, load the driver (nvidia-smi lists the GPUs; docker run --gpus "
            "all), or set --address to a Ray cluster with GPUs"
        )


def _serve_until(
    stop: threading.Event,
    config: Config,
    args: argparse.Namespace,
    screen: StartScreen,
    processes: RayProcesses,
    download: Download,
) -> None:
    address = args.address

    def show(reason: str) -> None:
        screen.state(reason + ("" if address is not None else download.share()))

    if address is not None:
        from swell.cluster.cli.doctor.doctor_command import check_start

        screen.timeline.enter("checks of all hosts")
        screen.state("checking all hosts of the Ray cluster")
        check_start(config)
    is_lost = processes.has_lost_one
    screen.timeline.enter("Ray Serve")
    with (
        application(config, screen.line, stop, own_ray=address is None, is_lost=is_lost) as ingress,
        _ending_sets(stop),
    ):
        limit_s = config.cluster.start_timeout_s + SERVE_S
        screen.timeline.enter("manager and ingresses")
        on_ingress = partial(screen.timeline.enter, "engines")
        host = _wait_until_ready(ingress, stop, limit_s, show, on_ingress)
        if host is not None:
            phases = screen.timeline.finish()
            url = _url(config.serve, host, is_here=address is None)
            screen.line(f"ready: {url}")
            for line in explanation(phases, _engine_starts(ingress)) if args.explain_start else ():
                screen.line(line)
            stop.wait()
        _on_signals(signal.SIG_IGN)
        screen.line("stopping: waiting for streams to finish")


@contextlib.contextmanager
def _ending_sets(stop: threading.Event) -> Iterator[None]:
    """Sets it when the application begins to end, also after an error."""
    try:
        yield
    finally:
        stop.set()


@contextlib.contextmanager
def _files() -> Iterator[Path]:
    """Creates a private folder for the files of this start, after removing abandoned folders of
    earlier starts. Afterwards, remove the unpacked files of GGUF models that no process uses."""
    remove_abandoned()
    try:
        with session_folder(keep=bool(os.environ.get("SWELL_KEEP_LOGS"))) as folder:
            yield Path(folder)
    finally:
        remove_unused()


@contextlib.contextmanager
def _claimed_port(config: Config, address: str | None) -> Iterator[tuple[Config, PortClaim | None]]:
    """Yields the configuration with a port that is free here, and the claim that keeps it for this
    process. On a Ray at `address`, `check_start` checks the ports of the hosts, and the ingresses
    claim them. Raises ConfigError."""
    if address is not None:
        yield config if config.serve.port else with_chosen_port(config, "0.0.0.0"), None
        return
    node = _node_address() if config.serve.host == ON_INTERFACE else ""
    config = claim_port(config, node)
    host, start = listening_host(config, node), f"swell serve {os.getpid()}"
    claim = PortClaims().claim(host, config.serve.port, start, os.getpid())
    try:
        yield config, claim
    finally:
        claim.release(ends=True)


def _share_with_ingresses(claim: PortClaim) -> None:
    from swell.cluster.serve_status import application_owner

    claim.set_owner(application_owner(APP))


def _node_address() -> str:
    """Returns the address that Ray will use for this host."""
    import ray

    address: str = ray.util.get_node_ip_address()
    return address


def _on_signals(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


@contextlib.contextmanager
def _ray(
    address: str | None,
    folder: Path,
    screen: StartScreen,
    stop: threading.Event,
    limit_s: float,
    take_signals: Callable[[], None],
) -> Iterator[RayProcesses]:
    """Connects to the Ray cluster at `address`, or starts one on this machine that does not leave
    files. Yields the processes that were started for it."""
    if address is None:
        use_private_files(folder, screen.line)
        screen.line("starting Ray on this machine")
        with local_ray(folder / "ray", screen, stop, limit_s, take_signals) as processes:
            yield processes
        return
    import ray

    screen.line(f"connecting to Ray at {address}")
    try:
        ray.init(
            address=address, namespace="swell", log_to_driver=False, logging_level=logging.ERROR
        )
    except SystemExit:  # SIGTERM, from Ray's own handler
        raise Stopped from None
    except Exception as error:
        raise StartupError(
            f"no connection to Ray at --address={address!r}: {last_line(str(error))}; this Ray "
            "needs a node on this machine (ray start --address), with the same versions of "
            "Python and Ray and the same token"
        ) from error
    try:
        yield RayProcesses()
    finally:
        ray.shutdown()


def _url(serve: ServeConfig, host: str, *, is_here: bool) -> str:
    """Returns the URL of an ingress. `host`: the address of its host; `is_here`: this is that
    host."""
    shown = serve.host
    if shown == ON_INTERFACE:
        shown = host
    elif shown in _LOOPBACK_OF:
        shown = _LOOPBACK_OF[shown] if is_here else host
    return f"http://[{shown}]:{serve.port}" if ":" in shown else f"http://{shown}:{serve.port}"


def _wait_until_ready(
    ingress: Any,
    stop: threading.Event,
    limit_s: float,
    show: Callable[[str], None],
    on_ingress: Callable[[], None],
) -> str | None:
    """Shows the reason of the wait until the cluster is ready. Returns the address of an ingress's
    host; None: stopped meanwhile. `on_ingress`: called when an ingress answers. Raises StartupError
    after `limit_s`, or if the start failed.

    The ingresses answer through Ray, because this process may run where it cannot reach them.
    """
    started = time.monotonic()
    while not stop.is_set():
        reason = _waits_for_serve()
        status = None if reason else _status(ingress)
        if status is not None:
            on_ingress()
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
        show(reason)
        stop.wait(_POLL_S)
    return None


def _waits_for_serve() -> str | None:
    """Returns why Serve is not ready; None: all ingresses run. Raises StartupError if Serve gave
    up."""
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException
    from ray.serve.schema import ApplicationStatus

    try:
        found = serve.status().applications.get(APP)
    except (RayError, RayServeException):
        return "Ray Serve's controller does not answer"
    if found is None:
        return "Ray Serve is starting the application"
    if found.status == ApplicationStatus.RUNNING:
        return None
    # The application's own message only names the deployments.
    messages = [found.message, *(deployment.message for deployment in found.deployments.values())]
    if found.status == ApplicationStatus.DEPLOY_FAILED:
        raise StartupError(last_line("\n".join(filter(None, messages))))
    return waiting_reason(messages)


def _status(ingress: Any) -> Any:
    """Returns the `IngressStatus` of any ingress; None: none answers in time."""
    return _answer(ingress.status)


def _engine_starts(ingress: Any) -> dict[int, list[StartPhase]]:
    """Returns the phases of the engines' starts; empty: no ingress answers in time."""
    return _answer(ingress.engine_starts) or {}


def _answer(method: Any) -> Any:
    """Returns what any ingress answers to a call without arguments; None: none in time."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    with contextlib.suppress(TimeoutError, RayError, RayServeException):
        return method.remote().result(timeout_s=_STATUS_S)
    return None
