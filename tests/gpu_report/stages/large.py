"""Decode steps and a prompt of the 8B shape."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.gpu_report.engines import write_config
from tests.gpu_report.scale import SHAPES, Figures, Scale
from tests.gpu_report.stages import decode, prefill


def run(scale: Scale) -> Figures:
    shape = SHAPES[scale.pick("8B", "tiny")]
    sizes = scale.pick([(1, 192), (64, 192), (64, 2048)], [(1, 8)])
    with tempfile.TemporaryDirectory(prefix="swell-gpu-") as name:
        folder = write_config(Path(name), shape)
        figures = decode.measure(scale, folder, shape, sizes, scale.pick(32, 2))
        return figures | prefill.measure(scale, folder, shape, scale.pick([2000], [20]))
