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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
from ray.core.generated.autoscaler_pb2 import DrainNodeReason, DrainNodeRequest
from ray.core.generated.autoscaler_pb2_grpc import AutoscalerStateServiceStub
from ray.core.generated.gcs_pb2 import GcsNodeInfo
from ray.core.generated.gcs_service_pb2 import GetAllNodeInfoRequest
from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub

from swell.cluster.cli.child_process import descendants
from swell.coordinator.transport.ports import free_port
from tests.faults.process import title
from tests.support import reaper
from tests.support.deadlines import HANG_S

_STOP_S = 5.0
_CALL_S = 30.0
"""The timeout of a call to Ray's GCS."""
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
        deadline = time.monotonic() + HANG_S
        while time.monotonic() < deadline:
            with contextlib.suppress(grpc.RpcError):
                self.nodes()
                return self
            time.sleep(0.1)
        self.close()
        raise TimeoutError("Ray does not start")

    def __exit__(self, *_error: object) -> None:
        self.close()

    @contextlib.contextmanager
    def adds_no_node(self) -> Iterator[None]:
        """Stops Ray's autoscaler, which otherwise may add a node before the status shows that one
        is missing."""
        autoscaler = self._autoscaler()
        os.kill(autoscaler, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(autoscaler, signal.SIGCONT)

    def _autoscaler(self) -> int:
        """Returns the process id of Ray's autoscaler."""
        deadline = time.monotonic() + HANG_S
        while time.monotonic() < deadline:
            for pid in descendants(self._head.pid):
                if "_private/monitor.py" in title(pid):
                    return pid
            time.sleep(0.1)
        raise TimeoutError("Ray's autoscaler does not start")

    def drain(self, node: str, deadline_s: int) -> None:
        """Drains a node, as after the notice of a cloud that reclaims spot capacity."""
        notice = DrainNodeRequest(
            node_id=bytes.fromhex(node),
            reason=DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION,
            reason_message="spot capacity",
            deadline_timestamp_ms=int((time.time() + deadline_s) * 1000),
        )
        with self._gcs() as channel:
            reply = AutoscalerStateServiceStub(channel).DrainNode(notice, timeout=_CALL_S)
        assert reply.is_accepted, reply.rejection_reason_message

    def nodes(self) -> list[str]:
        """Returns the ids of the nodes that are alive, without the head. Raises grpc.RpcError if
        Ray's GCS does not answer."""
        with self._gcs() as channel:
            stub = NodeInfoGcsServiceStub(channel)
            found = stub.GetAllNodeInfo(GetAllNodeInfoRequest(), timeout=_CALL_S).node_info_list
        return [
            node.node_id.hex()
            for node in found
            if node.state == GcsNodeInfo.ALIVE and not node.is_head_node
        ]

    def _gcs(self) -> grpc.Channel:
        """Returns a channel to Ray's GCS. A client of Ray would be a process that imports Ray."""
        return grpc.insecure_channel(self.address, options=[("grpc.enable_http_proxy", 0)])

    def close(self) -> None:
        """Stops the head, and with it the nodes, which are its child processes."""
        self._head.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._head.wait(_STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._head.pid, signal.SIGKILL)
        self._head.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
