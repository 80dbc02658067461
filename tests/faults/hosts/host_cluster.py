"""`swell serve` on the Ray of several hosts, started on the first, with an ingress on each."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from swell.cluster.api.admin.protocol import ClusterState
from tests.faults.cluster_monitor import INGRESS, MANAGER, STORE
from tests.faults.hosts.hosts import Hosts
from tests.faults.process import Cluster, ClusterFailed, listeners

_ACTORS = ("EngineActor", "WorkerActor", "Coordinator", MANAGER, INGRESS, STORE, "watchdog_process")
"""Parts of the titles of processes that terminate with the application."""
_END_S = 60.0
_END_COORDINATOR = """
import sys, ray
ray.init(address=sys.argv[1], namespace="swell", log_to_driver=False)
for actor in ray.util.list_named_actors(all_namespaces=True):
    if actor["name"].startswith("coordinator-"):
        ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))
"""


class HostCluster(Cluster):
    """A cluster whose host 0 runs Ray's GCS, Serve's controller and the command `swell serve`."""

    def __init__(self, hosts: Hosts, source: str | Path, *settings: str) -> None:
        self.hosts = hosts
        super().__init__(
            source,
            *settings,
            prefix=hosts.prefix(0),
            options=["--address", hosts.ray_address, "--host", "0.0.0.0"],
        )

    @property
    def urls(self) -> list[str]:
        return [self.url_of(host) for host in range(len(self.hosts.addresses))]

    def url_of(self, host: int) -> str:
        return f"http://{self.hosts.addresses[host]}:{self.port}"

    def host_of(self, pid: int | None) -> int | None:
        """Returns the host of a process; None if it runs on none of them."""
        hosts = range(len(self.hosts.addresses))
        return next((host for host in hosts if pid in self.hosts.pids(host)), None)

    def pids_on(self, host: int, state: ClusterState) -> frozenset[int]:
        """Returns the engines and workers on that host."""
        here = set(self.hosts.pids(host))
        engines = {engine.pid for engine in state.engines}
        workers = {worker.pid for engine in state.engines for worker in engine.workers}
        return frozenset(pid for pid in engines | workers if pid is not None and pid in here)

    def named(self, part: str) -> list[int]:
        hosts = range(len(self.hosts.addresses))
        return [pid for host in hosts for pid in self.hosts.named(host, part)]

    def listeners(self) -> int:
        """Returns the number of sockets that listen on the cluster's port, on all hosts."""
        living = [pids[0] for pids in map(self.hosts.pids, range(len(self.urls))) if pids]
        return sum(listeners(self.port, pid) for pid in living)

    def end_coordinator(self) -> None:
        """Terminates the coordinator's actor for good, so that the manager creates one on its own
        host."""
        command = [sys.executable, "-c", _END_COORDINATOR, self.hosts.ray_address]
        subprocess.run(
            [*self.hosts.prefix(0), *command], check=True, capture_output=True, timeout=_END_S
        )

    def stop(self) -> None:
        if self.process.poll() == -signal.SIGKILL:  # the processes, and the host of each
            self.kill()
        else:
            super().stop()

    def assert_gone(self) -> None:
        if left := [part for part in _ACTORS if self.named(part)]:
            raise ClusterFailed(f"left on the hosts: {left}")

    def kill(self) -> None:
        """Kills everything, including Ray, and starts an empty Ray on every host."""
        super().kill()
        self.hosts.restart()
