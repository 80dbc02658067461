"""The application on Ray Serve, from its deployment until nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

from swell.cluster.cli.start.start_reasons import StartupError, last_line
from swell.configs.schema import Config

T = TypeVar("T")

APP = "swell"
SERVE_S = 10.0
"""Time that Serve itself needs to stop replicas."""
_SERVE_ERRORS = 3
"""Errors after which the start of Serve fails; timeouts are retried."""
_POLL_S = 0.25
_ANSWER_S = 60.0
"""How long a call of Serve may take at the end: twice the longest of its own time limits."""


@contextlib.contextmanager
def application(
    config: Config,
    line: Callable[[str], None],
    stop: threading.Event,
    *,
    own_ray: bool,
    is_lost: Callable[[], bool] = lambda: False,
) -> Iterator[object]:
    """Deploys the Serve application and deletes it afterwards. Yields the handle of its ingresses.

    On a Ray cluster of others, only our application is deleted, because Serve may have more. If Ray
    has stopped (`is_lost`), or no longer answers, it is not called any more.
    """
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    _start_serve(config, stop)
    try:
        yield _deploy(config, line)
    finally:
        try:
            _asked(is_lost, partial(serve.delete, APP, _blocking=False))
            _wait_until_deleted(config, is_lost)
            if own_ray:
                _asked(is_lost, serve.shutdown)
            else:
                _clean_up_leftovers(line)
        except _RayLost:
            pass
        except _NoAnswer:
            left = "stopping Ray" if own_ray else f"delete the application {APP!r} there yourself"
            line(f"Ray Serve has not answered for {_ANSWER_S:g} s: {left}")


class _RayLost(Exception):
    """Raised if Ray has stopped before the application."""


class _NoAnswer(Exception):
    """Raised if Ray has not stopped and does not answer in time."""


class Stopped(Exception):
    """Raised if SIGINT or SIGTERM came before the application was deployed."""


def _asked(is_lost: Callable[[], bool], call: Callable[[], T]) -> T:
    """Returns the result of a call that waits for Ray. Raises _RayLost as soon as Ray has stopped,
    and _NoAnswer after `_ANSWER_S`."""
    deadline = time.monotonic() + _ANSWER_S
    future: Future[T] = Future()
    threading.Thread(target=_fulfil, args=(future, call), daemon=True).start()
    while time.monotonic() < deadline:
        if is_lost():
            raise _RayLost
        with contextlib.suppress(TimeoutError):
            if wait([future], _POLL_S).done:
                return future.result()
    raise _NoAnswer


def _fulfil(future: Future[T], call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


def _start_serve(config: Config, stop: threading.Event) -> None:
    """Starts Serve, and retries because its own time limits are shorter. Raises StartupError after
    `cluster.start_timeout_s`, and Stopped if `stop` is set meanwhile."""
    from ray import serve

    proxy, limit_s = config.serve.proxy_port, config.cluster.start_timeout_s
    began_s, errors = time.monotonic(), 0
    while not stop.is_set():
        try:
            serve.start(
                proxy_location="EveryNode" if proxy else "Disabled",
                http_options={"host": config.serve.host, "port": proxy or 8000},
            )
            return
        except Exception as error:
            errors += not isinstance(error, TimeoutError)
            seconds = time.monotonic() - began_s
            if not stop.is_set() and (seconds > limit_s or errors >= _SERVE_ERRORS):
                raise StartupError(
                    f"Ray Serve did not start within {seconds:.0f} s "
                    f"(cluster.start_timeout_s={limit_s:g}): {last_line(str(error))}; free "
                    "processors and memory, raise the limit, or read Ray's logs "
                    "(SWELL_KEEP_LOGS=1)"
                ) from error
        stop.wait(_POLL_S)
    raise Stopped


def _wait_until_deleted(config: Config, is_lost: Callable[[], bool]) -> None:
    """Waits as long as the application may take: a drain takes longer than Serve's own wait."""
    from ray import serve
    from ray.exceptions import RayError

    from swell.cluster.app import shutdown_s

    deadline = time.monotonic() + shutdown_s(config) + SERVE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(RayError):  # Serve's controller is restarting
            if APP not in _asked(is_lost, serve.status).applications:
                return
        time.sleep(_POLL_S)


def _clean_up_leftovers(line: Callable[[str], None]) -> None:
    """Removes what a dead manager left. Usually the manager has stopped everything, but if it was
    dead when the application was deleted, Serve does not start another one."""
    from swell.cluster.control.engines import orphans
    from swell.cluster.control.ray.checkpoint_store import CheckpointStore
    from swell.cluster.control.ray.ray_cluster import RayCluster

    async def clean_up() -> None:
        ray, namespace = RayCluster(), f"swell-{APP}"
        if ended := await orphans.end_all(ray, namespace):
            line(f"removed what a dead manager had left: {', '.join(ended)}")
        await CheckpointStore(namespace, "", ray).clear()

    asyncio.run(clean_up())


def _deploy(config: Config, line: Callable[[str], None]) -> Any:
    """Hands the application to Serve without waiting for it: Serve's own wait never times out."""
    from ray import serve

    from swell.cluster import app

    line("starting the ingress")
    target = serve.RunTarget(app.application(config), name=APP, route_prefix="/")
    try:
        (ingress,) = serve.run_many([target], wait_for_applications_running=False)
    except Exception as error:
        raise StartupError(
            f"Ray Serve did not accept the application: {last_line(str(error))}; Ray's logs have "
            "more (SWELL_KEEP_LOGS=1)"
        ) from error
    return ingress
