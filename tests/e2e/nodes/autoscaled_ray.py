"""A Ray cluster on this machine whose autoscaler starts and terminates nodes. It uses the fake node
provider with which Ray tests its autoscaler: each node is a raylet on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from swell.coordinator.transport.ports import free_port
from tests.support import reaper

_START_S = 60.0
_STOP_S = 5.0
_RAY = str(Path(sys.executable).with_name("ray"))
_EMPTY_LISTS = (
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
    "cluster_synced_files",
    "rsync_exclude",
    "rsync_filter",
)


class AutoscaledRay:
    """A head with one CPU and up to three nodes with one CPU each. Used as a context manager."""

    def __init__(self, idle_s: float = 3.0) -> None:
        """`idle_s`: the time after which a node without reservations is terminated."""
        self._folder = tempfile.mkdtemp(prefix="swell-test-", dir="/tmp")
        self.address = f"127.0.0.1:{free_port('127.0.0.1', range(21000, 22000))}"
        self._environment = {
            **os.environ,
            "RAY_FAKE_CLUSTER": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_AUTH_MODE": "disabled",
            "RAY_ADDRESS": self.address,
        }
        config = Path(self._folder) / "autoscaling.json"
        config.write_text(json.dumps(self._config(idle_s)))
        reaper.start()
        self._head = subprocess.Popen(
            [
                _RAY,
                "start",
                "--head",
                "--block",
                "--node-ip-address=127.0.0.1",
                f"--port={self.address.rpartition(':')[2]}",
                "--num-cpus=1",
                "--include-dashboard=false",
                "--disable-usage-stats",
                f"--temp-dir={self._folder}",
                f"--autoscaling-config={config}",
            ],
            env=self._environment,
            stdout=(Path(self._folder) / "start.log").open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _config(self, idle_s: float) -> dict[str, Any]:
        return {
            "cluster_name": "fake_multinode",
            "max_workers": 3,
            "provider": {
                "type": "fake_multinode",
                "gcs_address": self.address,
                "use_node_id_as_ip": True,  # all nodes have the same address
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
            },
            "available_node_types": {
                "ray.head.default": {
                    "resources": {"CPU": 1},
                    "node_config": {},
                    "max_workers": 0,
                },
                "worker": {
                    "resources": {"CPU": 1, "object_store_memory": 100 * 1024 * 1024},
                    "node_config": {},
                    "min_workers": 0,
                    "max_workers": 3,
                },
            },
            "head_node_type": "ray.head.default",
            "upscaling_speed": 1.0,
            "idle_timeout_minutes": idle_s / 60,
            "auth": {},
            "docker": {},
            "file_mounts": {},
            "file_mounts_sync_continuously": False,
            **{name: [] for name in _EMPTY_LISTS},
        }

    def __enter__(self) -> AutoscaledRay:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self._run("health-check", f"--address={self.address}").returncode == 0:
                return self
        self.close()
        raise TimeoutError("Ray does not start")

    def __exit__(self, *_error: object) -> None:
        self.close()

    def drain(self, node: str, deadline_s: int) -> None:
        """Drains a node, as after the notice of a cloud that reclaims spot capacity."""
        done = self._run(
            "drain-node",
            f"--address={self.address}",
            f"--node-id={node}",
            "--reason=DRAIN_NODE_REASON_PREEMPTION",
            "--reason-message=spot capacity",
            f"--deadline-remaining-seconds={deadline_s}",
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def nodes(self) -> list[str]:
        """Returns the ids of the nodes that are alive, without the head."""
        lines = (
            "import ray; ray.init(logging_level=50)\n"
            "for node in ray.nodes():\n"
            "  if node['Alive'] and 'node:__internal_head__' not in node['Resources']:\n"
            "    print('NODE', node['NodeID'])\n"
        )
        done = self._execute([sys.executable, "-c", lines])
        assert done.returncode == 0, done.stderr
        return [line.split()[1] for line in done.stdout.splitlines() if line.startswith("NODE")]

    def _run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self._execute([_RAY, *words])

    def _execute(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=_START_S
        )

    def close(self) -> None:
        """Stops the head, and with it the nodes, which are its child processes."""
        self._head.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._head.wait(_STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._head.pid, signal.SIGKILL)
        self._head.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
