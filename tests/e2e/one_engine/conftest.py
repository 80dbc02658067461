from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.e2e.cluster import NANO, Cluster


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """One engine with one worker, as the demo has it; shared by all tests of this folder, which
    leave it so. Its Ray is stopped (SIGSTOP) when it has to end, and nothing of it stays."""
    with Cluster(NANO, "model.dtype=float32", "cluster.stall_timeout_s=5") as running:
        yield running
        for pid in running.named("raylet/raylet"):
            os.kill(pid, signal.SIGSTOP)
