"""Figures of Swell, with a reference of the same rounds, and their bounds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec


class MedianRange(msgspec.Struct, frozen=True):
    """The median and range of one number over the rounds."""

    median: float
    low: float
    high: float


class Figure(msgspec.Struct, frozen=True, omit_defaults=True):
    """One number, with a value for each round; with a reference, the ratio counts, round by
    round."""

    what: str
    """The name with its unit: `output tokens/s`."""
    ours: list[float]
    against: str = ""
    """The reference. If it is empty, the bounds are on the number itself."""
    theirs: list[float] = []
    at_least: float | None = None
    at_most: float | None = None

    @property
    def compared(self) -> MedianRange:
        """Returns the value that the bounds apply to: the ratio of ours to theirs, or ours."""
        return spread(ratios(self.ours, self.theirs) if self.against else self.ours)

    @property
    def met(self) -> bool | None:
        """Whether the median is within the bounds; None without bounds."""
        if self.at_least is None and self.at_most is None:
            return None
        value = self.compared.median
        return (self.at_least is None or value >= self.at_least) and (
            self.at_most is None or value <= self.at_most
        )


class CaseResult(msgspec.Struct, frozen=True):
    """All figures of one case, and the environment."""

    figures: list[Figure]
    machine: dict[str, str]
    versions: dict[str, str]
    peers: dict[str, str]
    """Package of each peer that took part -> its version."""
    date: str
    commit: str
    repeats: int
    seconds: float
    problems: list[str] = []


Results = dict[str, CaseResult]
"""Name of a case -> its latest result."""


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Returns the ratios of pairs that were measured in the same round. Raises ValueError if one is
    missing."""
    return [our / their for our, their in zip(ours, theirs, strict=True)]


def spread(values: Sequence[float]) -> MedianRange:
    return MedianRange(statistics.median(values), min(values), max(values))


def read(path: Path) -> Results:
    """Returns the results in the file; none if there is no file."""
    return msgspec.json.decode(path.read_bytes(), type=Results) if path.exists() else {}


def write(path: Path, results: Results) -> None:
    """Writes these cases into the file; others stay."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode({**read(path), **results}), indent=1)
    path.write_bytes(text + b"\n")
