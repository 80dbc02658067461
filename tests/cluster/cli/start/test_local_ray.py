"""`swell serve` starts its own Ray, and retries until `cluster.start_timeout_s`."""

from __future__ import annotations

import inspect
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._private import node, services
from ray._private.accelerators import get_accelerator_manager_for_resource

from swell.cluster.cli.main import main
from swell.cluster.cli.start import local_ray, ray_processes, ray_settings
from swell.cluster.cli.start.ray_processes import RayEnded, RayProcesses
from swell.cluster.cli.start.start_reasons import StartupError
from tests.support.deadlines import HANG_S

TOO_SLOW = "The current node timed out during startup. This could happen because of the raylet"
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
UNTIL_LINE = [sys.executable, "-c", "input()"]


class Screen:
    def __init__(self) -> None:
        self.states: list[str] = []

    def state(self, text: str) -> None:
        self.states.append(text)


class FakeRay:
    """A fake `ray` module. `ray.init` raises the given errors in turn, then succeeds. Each attempt
    starts a process."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.attempts = 0
        self.processes: list[subprocess.Popen[Any]] = []
        self.during: Callable[[], None] = lambda: None

    def init(self, **_options: Any) -> None:
        self.attempts += 1
        self.processes.append(services.ConsolePopen(SLEEP))
        self.during()
        if self.errors:
            raise self.errors.pop(0)

    def living(self) -> list[int]:
        return [process.pid for process in self.processes if process.poll() is None]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    found = FakeRay()
    monkeypatch.setattr(ray, "init", found.init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    context = SimpleNamespace(gcs_address="")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(local_ray, "_BETWEEN_S", 0.0)
    monkeypatch.setattr(local_ray, "_QUICK_S", 0.0)  # treats every attempt as a slow one
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(ray_settings, "protect_token", lambda: None)
    monkeypatch.setattr(ray_settings, "end_idle_daemons", lambda: None)
    yield found
    for process in found.processes:
        process.kill()
        process.wait()


@pytest.fixture
def screen() -> Screen:
    return Screen()


def started(screen: Screen, folder: Path, limit_s: float = 600.0, stop: Any = None) -> Any:
    stop = stop or threading.Event()
    return local_ray.local_ray(folder, screen, stop, limit_s, lambda: None)  # type: ignore[arg-type]


def test_a_ray_that_is_too_slow_is_started_again(
    fake: FakeRay, screen: Screen, tmp_path: Path
) -> None:
    fake.errors = [Exception(TOO_SLOW), RuntimeError("Failed to start GCS.")]
    with started(screen, tmp_path):
        assert fake.attempts == 3
        assert fake.living() == [fake.processes[-1].pid], "of failed attempts nothing stays"
        assert os.getsid(fake.processes[-1].pid) == fake.processes[-1].pid != os.getsid(0)
    assert [state.partition(":")[0] for state in screen.states] == [
        "Ray did not start, attempt 2",
        "Ray did not start, attempt 3",
    ]


def test_the_limit_ends_the_attempts_in_one_line_with_the_remedy(
    fake: FakeRay, screen: Screen, tmp_path: Path
) -> None:
    fake.errors = [Exception(TOO_SLOW)] * 5
    with pytest.raises(StartupError) as found, started(screen, tmp_path, limit_s=0.0):
        pass
    text = str(found.value)
    assert TOO_SLOW in text and "cluster.start_timeout_s=0" in text and "\n" not in text
    assert "ray start --head" in text and "swell doctor" in text
    assert fake.attempts == 1 and not fake.living()


NANO = Path(__file__).parents[4] / "configs/models/nano"


class FakeTime:
    """The clock of the start. Only an attempt advances it."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def attempt(self) -> None:
        self.now_s += 40.0


@pytest.fixture
def serve() -> Iterator[Callable[..., int]]:
    """Runs `swell serve nano` with further arguments."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield lambda *further: main(["serve", str(NANO), "--port", "0", *further])
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("limit_s", [30, 100])
def test_swell_serve_tries_to_start_ray_up_to_a_limit_and_names_the_remedy(
    fake: FakeRay,
    serve: Callable[..., int],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    limit_s: int,
) -> None:
    """The command prints one line, without a traceback and without the lines of Ray."""
    time = FakeTime()
    monkeypatch.setattr(local_ray, "time", time)
    fake.during = time.attempt
    fake.errors = [Exception(f"a line\n{TOO_SLOW}")] * 9
    assert serve("--set", f"cluster.start_timeout_s={limit_s}") == 1
    assert fake.attempts == limit_s // 40 + 1 and not fake.living()
    *_, last = lines = capfd.readouterr().err.splitlines()
    assert last.startswith("swell: Ray did not start on this machine") and TOO_SLOW in last
    assert f"cluster.start_timeout_s={limit_s}" in last and "ray start --head" in last
    assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize("visible", [None, [], ["0"]])
@pytest.mark.parametrize("gpus", [0, 1])
def test_an_unavailable_device_is_refused_before_ray_starts(
    fake: FakeRay,
    serve: Callable[..., int],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    visible: list[str] | None,
) -> None:
    """`visible` lists the GPUs that CUDA_VISIBLE_DEVICES allows."""
    manager = get_accelerator_manager_for_resource("GPU")
    monkeypatch.setattr(manager, "get_current_node_num_accelerators", lambda: gpus)
    monkeypatch.setattr(manager, "get_current_process_visible_accelerator_ids", lambda: visible)
    fake.errors = [PermissionError("Ray was started")]
    assert serve("--set", "model.device=cuda") == 1
    *_, last = lines = capfd.readouterr().err.splitlines()
    is_here = gpus > 0 and visible != []
    assert fake.attempts == int(is_here)
    assert (
        "Ray was started"
        if is_here
        else "model.device=cuda, but the driver shows no GPU on this machine"
    ) in last
    assert is_here or len(lines) == 1


def test_a_permanent_error_ends_the_attempts_early(
    fake: FakeRay, screen: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.errors = [PermissionError("no home")]
    with pytest.raises(StartupError, match="no home"), started(screen, tmp_path):
        pass
    monkeypatch.setattr(local_ray, "_QUICK_S", 600.0)
    fake.errors = [RuntimeError("a library is missing")] * 5
    text = r"2 attempts.*a library is missing"
    with pytest.raises(StartupError, match=text), started(screen, tmp_path):
        pass


@pytest.mark.parametrize("error", [SystemExit(15), Exception(TOO_SLOW)])
def test_a_signal_ends_the_start_without_an_error(
    fake: FakeRay, screen: Screen, tmp_path: Path, error: BaseException
) -> None:
    """Ray's own SIGTERM handler raises SystemExit. SIGINT only sets `stop`."""
    stop = threading.Event()
    fake.errors = [error]
    fake.during = stop.set
    with started(screen, tmp_path, stop=stop):
        pass
    assert fake.attempts == 1 and not fake.living() and stop.is_set()


def test_ray_waits_for_its_node_for_the_configured_time(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [RuntimeError("not there yet")] * 3
    clock = iter(range(10))

    def get_node(*_arguments: Any) -> dict[str, int]:
        if answers:
            raise answers.pop()
        return {"node": 1}

    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(ray_processes, "_POLL_S", 0.0)
    monkeypatch.setattr(ray_processes.time, "monotonic", lambda: next(clock))
    with RayProcesses().recorded(lambda: 100.0):
        assert services.get_node("address", "id") == {"node": 1}
    assert services.get_node is get_node
    answers = [RuntimeError("not there yet")] * 9
    with RayProcesses().recorded(lambda: 5.0), pytest.raises(RayEnded, match="not there yet"):
        services.get_node("address", "id")
    assert not isinstance(RayEnded(), RuntimeError), "Ray would ask again"


def test_the_wait_for_a_node_ends_when_its_raylet_exits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_node(*_arguments: Any) -> None:
        raise RuntimeError("not there yet")

    monkeypatch.setattr(services, "get_node", get_node)
    program = tmp_path / "raylet"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    processes = RayProcesses()
    with processes.recorded(lambda: float("inf")):
        services.ConsolePopen([str(program)]).wait()
        assert processes.has_lost_one()
        with pytest.raises(RayEnded, match="has terminated"):
            services.get_node("address", "id")


def test_a_gcs_that_has_closed_its_port_is_lost() -> None:
    """After SIGTERM, the GCS process stays for a minute without answering."""
    processes = RayProcesses()
    assert not processes.has_lost_one()
    with socket.create_server(("127.0.0.1", 0)) as server:
        processes.gcs_address = f"127.0.0.1:{server.getsockname()[1]}"
        assert not processes.has_lost_one()
    assert processes.has_lost_one()


def test_ray_starts_its_processes_by_the_replaced_functions() -> None:
    """These functions may have other names in another version of Ray. Then a signal to the process
    group would hang the shutdown, and Ray would wait 30 s for its node."""
    assert "ConsolePopen(" in inspect.getsource(services.start_ray_process)
    text = inspect.getsource(node.Node.__init__)
    assert "services.get_node(" in text and "except RuntimeError" in text


def test_a_leftover_process_of_ray_is_stopped_with_it(
    fake: FakeRay, screen: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was suspended, or whose node was lost, does not notice that Ray has
    stopped."""
    monkeypatch.setattr(local_ray, "_LEFT_S", 0.1)
    left: list[subprocess.Popen[bytes]] = []

    def leave() -> None:
        with (tmp_path / "worker.err").open("w") as log:
            left.append(subprocess.Popen(SLEEP, stderr=log, start_new_session=True))
        os.kill(left[0].pid, signal.SIGSTOP)

    fake.during = leave
    with started(screen, tmp_path):
        assert left[0].poll() is None
    try:
        assert left[0].wait(timeout=HANG_S) == -signal.SIGKILL
    finally:
        left[0].kill()


def test_a_ray_that_does_not_stop_is_killed(
    fake: FakeRay, screen: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client waits for a raylet that does not answer: until it exits, or forever."""
    monkeypatch.setattr(local_ray, "_SHUTDOWN_S", 0.1)
    ended = threading.Event()

    def wait_for_raylet() -> None:
        fake.processes[-1].wait()
        ended.set()

    monkeypatch.setattr(ray, "shutdown", wait_for_raylet)
    with started(screen, tmp_path) as processes:
        pass
    assert not fake.living() and ended.wait(timeout=HANG_S) and not processes.is_client_left
    monkeypatch.setattr(local_ray, "_LOST_SHUTDOWN_S", 0.1)
    monkeypatch.setattr(ray, "shutdown", threading.Event().wait)
    with started(screen, tmp_path) as processes:
        pass
    assert not fake.living() and processes.is_client_left


def test_a_stopped_ray_terminates_in_order(
    fake: FakeRay, screen: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client waits for a stopped raylet, which continues once the end begins."""
    log, stop = tmp_path / "raylet.out", threading.Event()

    def start_stopped() -> None:
        with log.open("w") as file:
            fake.processes.append(services.ConsolePopen(UNTIL_LINE, stdin=PIPE, stdout=file))
        os.kill(fake.processes[-1].pid, signal.SIGSTOP)

    def ask_raylet() -> None:
        fake.processes[-1].communicate(b"end")

    fake.during = start_stopped
    monkeypatch.setattr(ray, "shutdown", ask_raylet)
    monkeypatch.setattr(local_ray, "_SHUTDOWN_S", 120.0)
    with started(screen, tmp_path, stop=stop):
        assert fake.processes[-1].poll() is None
    assert fake.processes[-1].returncode == 0 and stop.is_set()
