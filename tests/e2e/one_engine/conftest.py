from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.cluster import NANO, Cluster


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """One engine with one worker, as the demo has it; shared by all tests of this folder, which
    leave it so."""
    with Cluster(NANO, "model.dtype=float32", "cluster.stall_timeout_s=5") as running:
        yield running
