"""A sleeping engine gives its memory back, and answers the same after it wakes. The rate at which
weights reach the device from a file in the page cache."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from swell.worker.memory.uploads import Uploads
from tests.gpu_report.engines import Swell
from tests.gpu_report.scale import Figures, Scale
from tests.worker import tiny_models

PROMPT = [[5, 6, 7]]


def run(scale: Scale) -> Figures:
    figures: Figures = {}
    with tempfile.TemporaryDirectory(prefix="swell-gpu-") as name:
        folder = Path(name)
        tiny_models.make(folder, "llama")
        with Swell(folder, scale, cache__memory_bytes=scale.pick(8 << 30, 8 << 20)) as engine:
            before = engine.generate(PROMPT, 8)
            full = _used(scale)
            figures["s to sleep"] = _timed(lambda: engine.core.memory.set_sleep(1))
            if scale.is_full:
                share = (full - _used(scale)) / full
                assert share > 0.95, f"only {share:.0%} of the memory was given back"
                figures["share given back"] = round(share, 3)
            figures["s to wake"] = _timed(lambda: engine.core.memory.set_sleep(0))
            assert engine.generate(PROMPT, 8) == before
        figures["GB/s of weights to the device"] = _upload_rate(scale, folder / "weights")
    return figures


def _upload_rate(scale: Scale, file: Path) -> float:
    """Copies a file like a checkpoint: by parts of mapped memory."""
    count, part = scale.pick((32, 64 << 20), (3, 1 << 16))
    file.write_bytes(bytes(count * part))
    stored = torch.from_file(str(file), shared=False, size=count * part, dtype=torch.uint8)
    target = torch.ones(count * part, dtype=torch.uint8, device=scale.device)

    def upload() -> None:
        with Uploads(target.device) as uploads:
            for to, source in zip(target.split(part), stored.split(part), strict=True):
                uploads.copy(to, source)

    seconds = scale.seconds(upload)
    assert not target.any()
    return round(count * part / seconds / 1e9, 2)


def _used(scale: Scale) -> int:
    return torch.cuda.memory_reserved() if scale.is_full else 0


def _timed(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return round(time.perf_counter() - begun, 3)
