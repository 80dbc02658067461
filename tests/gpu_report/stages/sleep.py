"""A sleeping engine gives its memory back, and answers the same after it wakes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tests.gpu_report.engines import Swell
from tests.gpu_report.scale import Figures, Scale
from tests.worker import tiny_models

PROMPT = [[5, 6, 7]]


def run(scale: Scale) -> Figures:
    figures: Figures = {}
    with tempfile.TemporaryDirectory(prefix="swell-gpu-") as name:
        folder = Path(name)
        tiny_models.make(folder, "llama")
        with Swell(folder, scale, cache__memory_bytes=scale.pick(1 << 30, 8 << 20)) as engine:
            before = engine.generate(PROMPT, 8)
            full = _used(scale)
            figures["s to sleep"] = _timed(lambda: engine.core.memory.set_sleep(1))
            if scale.is_full:
                share = (full - _used(scale)) / full
                assert share > 0.9, f"only {share:.0%} of the memory was given back"
                figures["share given back"] = round(share, 3)
            figures["s to wake"] = _timed(lambda: engine.core.memory.set_sleep(0))
            assert engine.generate(PROMPT, 8) == before
    return figures


def _used(scale: Scale) -> int:
    return torch.cuda.memory_reserved() if scale.is_full else 0


def _timed(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return round(time.perf_counter() - begun, 3)
