"""The targets as a picture: one bar each, which shows how far its figure is above or below."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.benchmarks.report import number
from tests.benchmarks.results import Figure, Results

_MET, _MISSED = "#4c9f70", "#c8553d"


def plot(path: Path, results: Results) -> None:
    """Writes the picture as SVG or PNG, by the suffix of the name. Raises ValueError without
    matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'swell[bench]'") from None
    matplotlib.use("agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text: a fifth of the size
    matplotlib.rcParams["svg.hashsalt"] = "swell"
    from matplotlib import pyplot

    bars = [
        (name, figure)
        for name, result in results.items()
        for figure in result.figures
        if figure.met is not None
    ]
    picture, axes = pyplot.subplots(figsize=(9, 1.2 + 0.3 * len(bars)), layout="constrained")
    for place, (_, figure) in enumerate(reversed(bars)):
        _draw(axes, place, figure)
    axes.set_yticks(range(len(bars)), [label(*bar) for bar in reversed(bars)], fontsize=8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: number(value))
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("times the target; grey: lowest to highest round")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(picture)


def label(case: str, figure: Figure) -> str:
    against = f" / {figure.against}" if figure.against else ""
    return f"{case}: {figure.what}{against}: {number(figure.compared.median)}"


def achieved(figure: Figure, value: float) -> float:
    """Returns a value over its target: 1 just meets the target, and more is better."""
    if figure.at_least is not None:
        return value / figure.at_least
    assert figure.at_most is not None
    return figure.at_most / max(value, figure.at_most / 100)


def _draw(axes: Any, place: int, figure: Figure) -> None:
    compared = figure.compared
    reached, low, high = (
        achieved(figure, value) for value in (compared.median, compared.low, compared.high)
    )
    axes.barh(place, reached - 1, left=1, color=_MET if figure.met else _MISSED, height=0.6)
    axes.plot([low, high], [place, place], color="grey", linewidth=1.5)
