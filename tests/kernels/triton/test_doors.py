"""The stage of `make gpu` that compares every operation with float64, on the kernels for GPUs."""

from __future__ import annotations

import pytest

from swell.kernels import backends
from swell.kernels.triton.attention import launch
from tests.gpu_report.scale import Scale
from tests.gpu_report.stages import doors

pytestmark = pytest.mark.slow


def test_the_stage_passes_with_the_kernels_for_gpus(monkeypatch):
    monkeypatch.setattr(launch, "PROGRAMS", 24)  # the interpreter runs one after the other
    monkeypatch.setitem(backends.BACKENDS, "cpu", backends.BACKENDS["cuda"])
    backends.get.cache_clear()
    try:
        found = doors.run(Scale("cpu"))
    finally:
        backends.get.cache_clear()
    assert found == dict.fromkeys(backends.OPERATIONS, "triton")
