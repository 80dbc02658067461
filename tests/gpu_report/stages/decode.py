"""Decode steps of the 0.6B shape, compared with transformers and with the time to read the weights
and the KV once."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.gpu_report.engines import Swell, Transformers, prompts_of, step_seconds, write_config
from tests.gpu_report.idle import idle_share
from tests.gpu_report.scale import SHAPES, Figures, Scale, Shape

LONGEST_FOR_IDLE = 192
"""Longer prompts take too long to compute once more."""


def run(scale: Scale) -> Figures:
    shape = SHAPES[scale.pick("0.6B", "tiny")]
    sizes = scale.pick([(1, 192), (64, 192), (8, 192), (256, 192), (64, 2048)], [(1, 8), (3, 16)])
    figures: Figures = {}
    with tempfile.TemporaryDirectory(prefix="swell-gpu-") as name:
        folder = write_config(Path(name), shape)
        figures |= measure(scale, folder, shape, sizes, scale.pick(48, 4))
        eager = {"model__enforce_eager": True}
        figures |= measure(scale, folder, shape, sizes[:1], scale.pick(24, 4), "eager", **eager)
        static = Transformers(folder, scale, cache_implementation="static", disable_compile=True)
        for rows, context in sizes[:2]:
            prompts = prompts_of(rows, context, shape.vocab)
            seconds = step_seconds(scale, static, prompts, scale.pick(16, 2))
            figures[f"{rows} x {context}, transformers, ms"] = round(seconds * 1e3, 3)
            if ours := figures[f"{rows} x {context}, ms"]:
                ratio = round(seconds * 1e3 / ours, 2)
                figures[f"{rows} x {context}, transformers over Swell"] = ratio
    return figures


def measure(
    scale: Scale,
    folder: Path,
    shape: Shape,
    sizes: list[tuple[int, int]],
    steps: int,
    label: str = "",
    **settings: object,
) -> Figures:
    """Measures steps of (rows, context) with dummy weights."""
    figures: Figures = {}
    longest = max(context for _, context in sizes) + steps + 8
    tokens = max(rows * context for rows, context in sizes)
    with Swell(
        folder,
        scale,
        model__load_format="dummy",
        model__max_model_len=longest,
        scheduler__max_rows=max(rows for rows, _ in sizes),
        scheduler__max_tokens_per_step=min(tokens, 8192),
        **settings,
    ) as engine:
        for rows, context in sizes:
            prompts = prompts_of(rows, context, shape.vocab)
            seconds = step_seconds(scale, engine, prompts, steps)
            name = f"{rows} x {context}{label and ', ' + label}"
            figures[f"{name}, ms"] = round(seconds * 1e3, 3)
            nbytes = shape.step_bytes(rows, context)
            figures[f"{name}, times the limit"] = scale.times_limit(seconds, nbytes)
            if context <= LONGEST_FOR_IDLE:
                figures[f"{name}, idle share"] = idle_share(scale, engine, prompts, steps)
    return figures
