"""First tokens of long prompts, compared with the time of their products at the card's rate."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.gpu_report.engines import Swell, prompts_of, write_config
from tests.gpu_report.scale import SHAPES, Figures, Scale, Shape


def run(scale: Scale) -> Figures:
    shape = SHAPES[scale.pick("0.6B", "tiny")]
    with tempfile.TemporaryDirectory(prefix="swell-gpu-") as name:
        folder = write_config(Path(name), shape)
        return measure(scale, folder, shape, scale.pick([2000, 8000], [20]))


def measure(scale: Scale, folder: Path, shape: Shape, lengths: list[int]) -> Figures:
    """Measures prompts of these lengths with dummy weights."""
    rate = scale.earlier.get("ceilings", {}).get("bf16_tflop_per_s")
    figures: Figures = {}
    settings = {"scheduler__max_tokens_per_step": max(lengths)}
    with Swell(folder, scale, model__load_format="dummy", **settings) as engine:
        for length in lengths:
            prompt = prompts_of(1, length, shape.vocab)
            seconds = scale.seconds(lambda prompt=prompt: engine.generate(prompt, 1))
            figures[f"{length} tokens, ms"] = round(seconds * 1e3, 2)
            if rate:
                attention = 2 * shape.layers * shape.heads * shape.head_dim * length**2
                flop = 2 * shape.layer_parameters() * length + attention
                times = seconds / (flop / (rate * 1e12))
                figures[f"{length} tokens, times the limit"] = round(times, 2)
    return figures
