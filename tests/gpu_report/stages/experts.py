"""Decode steps of six layers with 128 experts; each token chooses eight of them."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.gpu_report.engines import write_config
from tests.gpu_report.scale import SHAPES, Figures, Scale
from tests.gpu_report.stages.decode import measure


def run(scale: Scale) -> Figures:
    shape = SHAPES[scale.pick("30B-A3B, 6 layers", "tiny experts")]
    sizes = scale.pick([(1, 192), (8, 192), (64, 192)], [(1, 8), (3, 8)])
    with tempfile.TemporaryDirectory(prefix="swell-gpu-") as name:
        folder = write_config(Path(name), shape)
        return measure(scale, folder, shape, sizes, scale.pick(32, 2))
