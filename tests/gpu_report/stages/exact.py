"""`model.exact`: the bits of an answer do not depend on its batch, and the price of this compared
with the default in the same run."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

from swell.worker.sampler_wire import SamplerParams, TokenLogprobs
from tests.gpu_report.engines import Swell, prompts_of, step_seconds, write_config
from tests.gpu_report.scale import SHAPES, Figures, Scale, Shape

SEEDED = SamplerParams(temperature=1.0, seed=7, logprobs=4)


def run(scale: Scale) -> Figures:
    figures: Figures = {}
    for name in scale.pick(("0.6B", "30B-A3B, 6 layers"), ("tiny", "tiny experts")):
        with tempfile.TemporaryDirectory(prefix="swell-gpu-") as folder:
            write_config(Path(folder), SHAPES[name])
            figures |= _measure(scale, Path(folder), SHAPES[name], name)
    return figures


def _measure(scale: Scale, folder: Path, shape: Shape, name: str) -> Figures:
    """Checks the bits, and measures decode steps and a long prompt."""
    sizes = scale.pick([(1, 192), (64, 192), (8, 2048)], [(1, 8), (3, 16)])
    steps, length = scale.pick((24, 2000), (3, 20))
    seconds: dict[bool, list[float]] = {}
    prompt = prompts_of(1, length, shape.vocab)
    for exact in (True, False):
        with _engine(scale, folder, exact) as engine:
            if exact:
                compared = _check_bits(scale, engine, shape)
            seconds[exact] = [
                step_seconds(scale, engine, prompts_of(*size, shape.vocab), steps) for size in sizes
            ] + [scale.seconds(partial(engine.generate, prompt, 1))]
    figures: Figures = {f"{name}, tokens with equal bits": compared}
    labels = [*(f"{rows} x {context}" for rows, context in sizes), f"prompt of {length}"]
    for label, slow, fast in zip(labels, seconds[True], seconds[False], strict=True):
        figures[f"{name}, {label}, exact, ms"] = round(slow * 1e3, 3)
        ratio = round(slow / fast, 2) if fast else None
        figures[f"{name}, {label}, exact over default"] = ratio
    return figures


def _engine(scale: Scale, folder: Path, exact: bool) -> Swell:
    return Swell(
        folder,
        scale,
        model__exact=exact,
        model__load_format="dummy",
        model__max_model_len=scale.pick(4096, 256),
        scheduler__max_rows=64,
        scheduler__max_tokens_per_step=scale.pick(2048, 32),
    )


def _check_bits(scale: Scale, engine: Swell, shape: Shape) -> int:
    """Asserts that tokens and log probabilities of each prompt are equal bit for bit by itself and
    with the others. Prompts are computed in chunks, which end elsewhere in a batch. Returns the
    number of tokens that were compared."""
    tokens, lengths = scale.pick((32, (1, 17, 300, 1500, 3000)), (4, (1, 17, 50)))
    prompts = [prompts_of(at + 1, n, shape.vocab)[at] for at, n in enumerate(lengths)]
    others = prompts_of(scale.pick(50, 5), scale.pick(90, 9), shape.vocab)
    together = engine.outputs([*prompts, *others], tokens, SEEDED)
    count = 0
    for prompt, batched in zip(prompts, together, strict=False):
        single = engine.outputs([prompt], tokens, SEEDED)[0]
        bits = [
            [extra for one in of_prompt for extra in one.extras if isinstance(extra, TokenLogprobs)]
            for of_prompt in (single, batched)
        ]
        assert len(bits[0]) == tokens
        assert bits[0] == bits[1], f"a prompt of {len(prompt)} tokens depends on its batch"
        count += tokens
    return count
