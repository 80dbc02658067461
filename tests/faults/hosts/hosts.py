"""Several hosts on one machine (`namespaces.py`), each with a node of one Ray.

If `redis-server` is on the path, Ray keeps its state there, on the machine, so that the host of its
GCS may be lost.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from swell.cluster.cli.start import ray_settings
from tests.faults.hosts.namespaces import HostsFailed, Namespaces, refusal, remove, run, wait_until
from tests.support.deadlines import HANG_S

__all__ = ["Hosts", "HostsFailed", "refusal"]

_RAY_PORT = 6379
_REDIS_PORT = 6380
_AUTH_MODE = "RAY_AUTH_MODE"
_CHECKS = "RAY_health_check_failure_threshold"
_NODE_SETTINGS = {
    # No other network reaches these hosts; a token would be stored in the user's home folder.
    _AUTH_MODE: "disabled",
    # A link that is cut for some seconds must not be the loss of a host. Ray's GCS considers a node
    # dead after this many failed checks; a failed check takes timeout and period, 5 s.
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "3000",
    _CHECKS: "6",
    # Ray's own value, 15, lets every other process of the machine run first.
    "RAY_worker_niceness": "0",
}
_PATIENT_SETTINGS = {_CHECKS: "24"}
"""With this value a host that is unreachable for 40 s is not considered lost: TCP may resend after
up to twice that time."""
_OUTLASTS = "RAY_grpc_keepalive_timeout_ms"
"""Ray's own value of this closes connections during an outage, so our replicas must set a larger
one."""
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


class Hosts(Namespaces):
    """`count` hosts, numbered from 0, each with a Ray node; host 0 has Ray's GCS. Used as a context
    manager, which removes everything when it closes."""

    def __init__(
        self,
        count: int = 2,
        cpus: int = 8,
        head_cpus: int | None = None,
        redis: str | None = None,
        gpus: int = 0,
    ) -> None:
        """`cpus`: the CPUs of each node, as Ray counts them; `head_cpus`: those of host 0, if
        different. `gpus`: the GPUs that Ray counts on each node; they need not exist. `redis`: the
        server program that keeps the state of Ray's GCS."""
        super().__init__(count)
        self._cpus = [cpus if head_cpus is None else head_cpus, *[cpus] * (count - 1)]
        self._gpus = gpus
        self._redis_program = redis
        self._redis: subprocess.Popen[bytes] | None = None
        self._patient = False

    @property
    def ray_address(self) -> str:
        return f"{self.addresses[0]}:{_RAY_PORT}"

    @property
    def keeps_gcs(self) -> bool:
        """Whether the state of Ray's GCS outlives host 0."""
        return self._redis is not None

    def start(self) -> None:
        """Starts a Ray node on every host."""
        if self._redis_program is not None:
            self._start_redis(self._redis_program)
        for host in range(len(self._names)):
            self.start_ray(host)

    def restart(self) -> None:
        """Kills every process of every host, and starts an empty Ray."""
        for host in range(len(self._names)):
            self.lose(host)
        if self._redis is not None:
            self._stop_redis()
            self._start_redis(str(self._redis_program))
        for host in range(len(self._names)):
            self.boot(host)

    def be_patient(self, patient: bool) -> None:
        """Sets whether Ray considers a host lost only after two minutes; restarts Ray if this
        changes."""
        if patient != self._patient:
            self._patient = patient
            self.restart()

    def prefix(self, host: int) -> list[str]:
        # A Ray that this process had before has left its own mode in the environment.
        settings = [f"{_AUTH_MODE}={_NODE_SETTINGS[_AUTH_MODE]}"]
        return [*super().prefix(host), "env", *settings]

    @contextlib.contextmanager
    def folder_replaced(self, host: int, folder: Path, by: Path) -> Iterator[None]:
        """Replaces a folder for the Ray node of a host and all processes that it starts. `ip netns
        exec` has given them a mount namespace of their own."""
        node = ["nsenter", "--mount", f"--target={self.named(host, 'raylet/raylet')[0]}"]
        run([*node, "mount", "--bind", str(by), str(folder)])
        try:
            yield
        finally:
            run([*node, "umount", str(folder)])

    def boot(self, host: int) -> None:
        """Starts the host of `lose` again, with a Ray node and none of its former state."""
        _clear(self._folder / str(host))
        self._make_host(host)
        self.start_ray(host)

    def start_ray(self, host: int) -> None:
        role = ["--head", f"--port={_RAY_PORT}"] if host == 0 else [f"--address={self.ray_address}"]
        command = [
            *self.prefix(host),
            *(str(Path(sys.executable).with_name("ray")), "start", *role),
            f"--node-ip-address={self.addresses[host]}",
            f"--num-cpus={self._cpus[host]}",
            f"--num-gpus={self._gpus}",
            f"--temp-dir={self._folder / str(host)}",
            "--object-store-memory=100000000",
            "--disable-usage-stats",
            "--include-dashboard=false",
        ]
        if host > 0:
            command.remove("--include-dashboard=false")
        patience = _PATIENT_SETTINGS if self._patient else {}
        with _settings({**self._gcs_store(), **patience}):
            run(command)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._stop_redis()

    def _gcs_store(self) -> dict[str, str]:
        if self._redis is None:
            return {}
        return {
            "RAY_REDIS_ADDRESS": f"{self.machine}:{_REDIS_PORT}",
            "RAY_external_storage_namespace": f"hosts-{os.getpid()}",
        }

    def _start_redis(self, program: str) -> None:
        words = ("--bind", self.machine, "--port", str(_REDIS_PORT))
        self._redis = subprocess.Popen(
            [program, *words, "--save", "", "--appendonly", "no", "--protected-mode", "no"],
            cwd=self._folder,
            stdout=subprocess.DEVNULL,
        )
        wait_until(
            lambda: _answers(self.machine, _REDIS_PORT), lambda: f"{program} does not answer"
        )

    def _stop_redis(self) -> None:
        if self._redis is not None:
            self._redis.kill()
            self._redis.wait()
            self._redis = None


def _clear(folder: Path) -> None:
    """Removes a folder, or renames it if logs are kept: Ray would read its own old address
    there."""
    remove(folder)
    if folder.exists():
        folder.rename(tempfile.mkdtemp(prefix=f"{folder.name}-lost-", dir=folder.parent))


@contextlib.contextmanager
def _settings(more: Mapping[str, str]) -> Iterator[None]:
    """Sets the environment of a Ray node, which uses little CPU while idle, as under `swell
    serve`."""
    before = dict(os.environ)
    ray_settings.set_defaults(HANG_S)
    os.environ.update(_NODE_SETTINGS, **more)
    os.environ.pop(_OUTLASTS, None)
    for name in _PROXIES:  # gRPC would connect to the other hosts through the proxies
        os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=1.0).close()
    except OSError:
        return False
    return True
