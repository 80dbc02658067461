"""The real Ray for its contract tests: one local cluster, with small actors in place of ours."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import ray

from swell.cluster.control.ray.ray_cluster import RayCluster
from swell.coordinator.actor import Coordinator
from swell.engine.serving.actor import EngineActor
from tests.cluster.control.ray.contract_cluster import OTHER_HOST
from tests.support.deadlines import HANG_S


class RealRay:
    """The `World` of the contract tests (`test_ray_contract.py`) on a real Ray. Connects this
    process to its own Ray cluster."""

    num_cpus = 4.0

    def __init__(self) -> None:
        self._other_host: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.mkdtemp(prefix="swell-test-", dir="/tmp")
        self._notes = Path(self._folder) / "notes"
        self._notes.touch()
        ray.init(
            address="local",
            num_cpus=int(self.num_cpus),
            include_dashboard=False,
            _temp_dir=self._folder,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
        )
        self.ray = RayCluster()
        self.ray.engine_class, self.ray.coordinator_class = (
            ray.remote(**actor._default_options)(_probe_class(str(self._notes), groups_of(actor)))
            for actor in (EngineActor, Coordinator)
        )

    def add_host(self) -> str:
        self._other_host = subprocess.Popen(
            [
                str(Path(sys.executable).with_name("ray")),
                "start",
                f"--address={ray.get_runtime_context().gcs_address}",
                "--num-cpus=0",
                f"--resources={json.dumps({OTHER_HOST: 1})}",
                "--disable-usage-stats",
                "--block",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + HANG_S
        while time.monotonic() < deadline:
            for node in ray.nodes():
                if node["Alive"] and OTHER_HOST in node["Resources"]:
                    return str(node["NodeID"])
            time.sleep(0.1)
        raise TimeoutError("the other host does not come up")

    def close(self) -> None:
        # The other host stops first: a raylet without its head node waits half a minute for it.
        if self._other_host is not None:
            self._other_host.terminate()
            self._other_host.wait()
        ray.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        asyncio.run(scenario)

    def notes(self) -> list[str]:
        return self._notes.read_text().split()

    def stop_process(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)

    def continue_process(self, pid: int) -> None:
        os.kill(pid, signal.SIGCONT)

    def process_lives(self, pid: int) -> bool:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] not in "ZX"


def groups_of(actor: Any) -> dict[str, str]:
    """Returns the concurrency group of each method that has one, by the method's name."""
    return dict(actor.__ray_metadata__.method_meta.concurrency_group_for_methods)


def _probe_class(notes: str, groups: dict[str, str]) -> type:
    class Probe:
        def __init__(self, *arguments: object) -> None:
            self._arguments = arguments

        def arguments(self) -> tuple[object, ...]:
            return self._arguments

        def pid(self) -> int:
            return os.getpid()

        def fail(self, text: str) -> None:
            raise LookupError(text)

        def note(self, text: str, wait_s: float) -> int:
            known = text in Path(notes).read_text().split()
            with open(notes, "a") as file:
                file.write(f"{text}\n")
            time.sleep(0.0 if known else wait_s)
            return os.getpid()

        def ended(self, timeout_s: float) -> None:
            time.sleep(timeout_s)

    for method in groups.keys() & vars(Probe).keys():
        ray.method(concurrency_group=groups[method])(getattr(Probe, method))
    return Probe
