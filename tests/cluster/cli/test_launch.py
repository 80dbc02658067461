"""The conditions and time limits of `swell serve` while it starts. The ingresses answer through
Ray."""

from __future__ import annotations

import argparse
import contextlib
import threading
from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.schema import ApplicationStatus

from swell.cluster.api.server_info import START_FAILED, NotReady
from swell.cluster.app import IngressStatus
from swell.cluster.cli import launch
from swell.cluster.cli.doctor import doctor_command
from swell.cluster.cli.start.application import APP
from swell.cluster.cli.start.hub_model import Download
from swell.cluster.cli.start.ray_processes import RayProcesses
from swell.cluster.cli.start.start_reasons import STARTING, StartupError
from swell.configs.schema import Config, ConfigError, ServeConfig, load
from swell.engine.serving.start_timeline import StartPhase, StartTimeline
from tests.support.paths import NANO

HOST = "10.1.2.3"
NO_ROOM = (
    "Deployment 'Ingress' in application 'swell' has 1 replicas that have taken more than 30s to "
    "be scheduled. This may be due to waiting for the cluster to auto-scale or for a runtime "
    "environment to be installed. Resources required for each replica: {'CPU': 1}, total "
    "resources available: {'CPU': 0.0}. Use `ray status` for more details."
)
SLOW = (
    "Deployment 'Manager' in application 'swell' has 1 replicas that have taken more than 30s to "
    "initialize.\nThis may be caused by a slow __init__ or reconfigure method."
)
LOADING = NotReady("engine 0: loading weights", "starting")


class FakeHandle:
    """A Serve handle whose calls return the given answers in turn and repeat the last one. None
    stands for a timeout."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)

    @property
    def status(self) -> FakeHandle:
        return self

    def remote(self) -> FakeHandle:
        return self

    def result(self, timeout_s: float) -> Any:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if answer is None:
            raise TimeoutError
        return answer


class FakeServe:
    """The application status of Serve: the given values in turn. Repeats the last one."""

    def __init__(self) -> None:
        self.statuses = [application(ApplicationStatus.RUNNING)]

    def __call__(self) -> SimpleNamespace:
        found = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        return SimpleNamespace(applications={} if found is None else {APP: found})


def application(status: ApplicationStatus, message: str = "", *deployments: str) -> SimpleNamespace:
    found = {text: SimpleNamespace(message=text) for text in deployments}
    return SimpleNamespace(status=status, message=message, deployments=found)


@pytest.fixture
def serve_status(monkeypatch: pytest.MonkeyPatch) -> FakeServe:
    fake = FakeServe()
    monkeypatch.setattr(serve, "status", fake)
    return fake


@pytest.fixture
def shown() -> list[str]:
    """The states that the start screen has shown."""
    return []


@pytest.fixture
def wait(
    serve_status: FakeServe, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str | None]:
    """Returns a function that waits for a handle with the given answers."""
    monkeypatch.setattr(launch, "_POLL_S", 0.01)

    def until_ready(*answers: IngressStatus | None, limit_s: float = 60.0) -> str | None:
        handle = FakeHandle(*answers)
        return launch._wait_until_ready(
            handle, threading.Event(), limit_s, shown.append, lambda: None
        )

    return until_ready


def test_a_ready_ingress_reports_its_address(wait: Any, shown: list[str]) -> None:
    assert wait(None, IngressStatus(HOST, LOADING), IngressStatus(HOST, None)) == HOST
    assert shown == ["no ingress answers", LOADING.reason]


def test_a_start_that_takes_too_long_ends_with_the_reason(wait: Any) -> None:
    with pytest.raises(StartupError, match=r"cluster\.start_timeout_s\): engine 0: loading"):
        wait(IngressStatus(HOST, LOADING), limit_s=0.3)
    with pytest.raises(StartupError, match="no ingress answers"):
        wait(None, limit_s=0.3)


def test_a_start_that_failed_ends_at_once(wait: Any) -> None:
    with pytest.raises(StartupError, match=r"^no such file$"):
        wait(IngressStatus(HOST, NotReady("no such file", START_FAILED)))


def test_the_reason_names_replicas_that_serve_has_not_started(
    wait: Any, serve_status: FakeServe, shown: list[str]
) -> None:
    """Serve by itself waits forever for a replica that does not fit on any host."""
    deploying = application(ApplicationStatus.DEPLOYING, "", "", NO_ROOM)
    serve_status.statuses = [None, deploying, application(ApplicationStatus.RUNNING)]
    assert wait(IngressStatus(HOST, None)) == HOST
    no_room = "no host has room for the ingress: it needs {'CPU': 1}, but {'CPU': 0.0} is free"
    assert shown == ["Ray Serve is starting the application", no_room]
    serve_status.statuses = [deploying]
    with pytest.raises(StartupError, match=r"start_timeout_s\): no host has room"):
        wait(IngressStatus(HOST, None), limit_s=0.3)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (SLOW, "the process of the manager is being started"),
        ("A replica failed to start. Error:\nOSError: no disk\n", "OSError: no disk"),
        ("Something new that Serve says.", STARTING),
    ],
)
def test_errors_of_serve_are_translated(
    wait: Any, serve_status: FakeServe, shown: list[str], message: str, reason: str
) -> None:
    """A user cannot make a slow constructor faster, so Serve's message about it is replaced."""
    deploying = application(ApplicationStatus.DEPLOYING, "", message)
    serve_status.statuses = [deploying, application(ApplicationStatus.RUNNING)]
    wait(IngressStatus(HOST, None))
    assert shown[0].endswith(reason) and "__init__" not in shown[0]


def test_the_start_waits_for_an_unresponsive_controller(
    wait: Any, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([RayActorError()])

    def status() -> SimpleNamespace:
        for error in answers:
            raise error
        return SimpleNamespace(applications={APP: application(ApplicationStatus.RUNNING)})

    monkeypatch.setattr(serve, "status", status)
    assert wait(IngressStatus(HOST, None)) == HOST
    assert shown == ["Ray Serve's controller does not answer"]


def test_an_application_that_serve_abandons_ends_the_start(
    wait: Any, serve_status: FakeServe
) -> None:
    trace = "the replica died\n  File x\nConfigError: cluster.interface='eth7' has no\n"
    text = "The deployments ['Manager'] are DEPLOY_FAILED."
    serve_status.statuses = [application(ApplicationStatus.DEPLOY_FAILED, text, trace, "")]
    with pytest.raises(StartupError, match=r"^ConfigError: cluster\.interface='eth7' has no$"):
        wait(IngressStatus(HOST, None))


@pytest.mark.parametrize(
    ("listens_at", "is_here", "url"),
    [
        ("0.0.0.0", True, "http://127.0.0.1:8000"),
        ("::", True, "http://[::1]:8000"),
        ("0.0.0.0", False, f"http://{HOST}:8000"),
        ("127.0.0.1", False, "http://127.0.0.1:8000"),
        ("interface", True, f"http://{HOST}:8000"),
    ],
)
def test_the_url_is_one_at_which_an_ingress_answers(
    listens_at: str, is_here: bool, url: str
) -> None:
    assert launch._url(ServeConfig(host=listens_at), HOST, is_here=is_here) == url


def test_the_shutdown_begins_also_after_an_error() -> None:
    """Otherwise a stopped raylet would hold up the end of a start that has failed."""
    stop = threading.Event()
    with pytest.raises(StartupError), launch._ending_sets(stop):
        raise StartupError("no such file")
    assert stop.is_set()


def test_the_hosts_of_a_ray_cluster_are_checked_before_the_application_is_deployed(
    monkeypatch: pytest.MonkeyPatch, shown: list[str]
) -> None:
    def refuse(_config: Config) -> None:
        raise ConfigError("on 10.1.2.3: no file")

    def deploy(*_: object, **__: object) -> None:
        raise AssertionError("deployed")

    monkeypatch.setattr(doctor_command, "check_start", refuse)
    monkeypatch.setattr(launch, "application", deploy)
    timeline = StartTimeline("Ray", lambda: 0.0)
    screen: Any = SimpleNamespace(state=shown.append, timeline=timeline)
    args = argparse.Namespace(address=HOST, explain_start=False)
    with pytest.raises(ConfigError, match="no file"):
        launch._serve_until(
            threading.Event(), load("owner/name"), args, screen, RayProcesses(), Download()
        )
    assert shown == ["checking all hosts of the Ray cluster"]


def test_a_signal_while_ray_starts_ends_without_a_call_of_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray has not started then, and any call of it would start another one."""

    @contextlib.contextmanager
    def interrupted(*args: Any) -> Iterator[RayProcesses]:
        (stop,) = (each for each in args if isinstance(each, threading.Event))
        stop.set()
        yield RayProcesses()

    def call_ray(*_: object) -> None:
        raise AssertionError("called Ray")

    monkeypatch.setattr(launch, "_ray", interrupted)
    monkeypatch.setattr(launch, "_on_signals", lambda _handler: None)
    for name in ("_share_with_ingresses", "_serve_until"):
        monkeypatch.setattr(launch, name, call_ray)
    args = SimpleNamespace(
        host=None, port=None, config=str(NANO), set=[("serve.port", 0)], address=None
    )
    assert launch.serve(cast("Any", args)) == 0


@pytest.mark.parametrize("explains", [True, False])
def test_the_phases_of_the_start_are_explained_on_request(
    monkeypatch: pytest.MonkeyPatch, serve_status: FakeServe, explains: bool
) -> None:
    status, engine = IngressStatus(HOST, None), {0: [StartPhase("loading weights", 2.0)]}
    ingress = SimpleNamespace(status=FakeHandle(status), engine_starts=FakeHandle(engine))
    serve_status.statuses.insert(0, application(ApplicationStatus.DEPLOYING, SLOW))
    monkeypatch.setattr(launch, "application", lambda *_, **__: contextlib.nullcontext(ingress))
    monkeypatch.setattr(launch, "_on_signals", lambda _handler: None)
    stop, lines, clock = threading.Event(), list[str](), count()
    monkeypatch.setattr(stop, "wait", lambda _timeout_s=None: True)
    timeline = StartTimeline("Ray", lambda: float(next(clock)))
    screen: Any = SimpleNamespace(state=lambda _: None, line=lines.append, timeline=timeline)
    args = argparse.Namespace(address=None, explain_start=explains)
    launch._serve_until(stop, load("owner/name"), args, screen, RayProcesses(), Download())
    explained = [
        "start: 4.0 s",
        "     1.0 s  Ray",
        "     1.0 s  Ray Serve",
        "     1.0 s  manager and ingresses",
        "     1.0 s  engines",
        "            engine 0: 2.0 s",
        "                 2.0 s  loading weights",
    ]
    shown = explained if explains else []
    assert lines == ["ready: http://127.0.0.1:8000", *shown, lines[-1]]
