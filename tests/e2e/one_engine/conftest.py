from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.e2e.cluster import NANO, Cluster


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """One engine with one worker, as in the demo. All tests of this folder share the cluster and
    must leave it in this state. At the end its raylet is suspended (SIGSTOP) before the cluster is
    stopped, and still no process or file of it may remain."""
    with Cluster(NANO, "model.dtype=float32", "cluster.stall_timeout_s=5") as running:
        yield running
        for pid in running.named("raylet/raylet"):
            os.kill(pid, signal.SIGSTOP)
