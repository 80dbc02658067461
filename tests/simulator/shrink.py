"""Shrinks a scenario that breaks a law: it removes parts, then shortens the remaining ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.simulator.scenario import Scenario

_PARTS = ("requests", "faults", "operations")
_SHORTEST_S = 0.05


def kind_of(broken: str) -> str:
    """Returns the law of a message: its words without a digit, so not which process broke it or
    when. A smaller scenario may break another law, for example because it pauses the cluster and
    never resumes it."""
    return " ".join(word for word in broken.split() if not re.search(r"\d", word))


def shrink(scenario: Scenario, is_broken: Callable[[Scenario], bool]) -> Scenario:
    """Returns the smallest scenario found that still breaks the law. `is_broken` runs a scenario;
    it must be true for the first one. Parts share no source of random numbers, so removing one
    leaves the others unchanged."""
    while True:
        smaller = next((each for each in _smaller(scenario) if is_broken(each)), None)
        if smaller is None:
            return scenario
        scenario = smaller


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Yields smaller scenarios, the largest steps first: without half of the parts, without single
    parts, then with each part shortened."""
    for name in _PARTS:
        parts = getattr(scenario, name)
        size = (len(parts) + 1) // 2
        while parts and size:
            for begin in range(0, len(parts), size):
                yield _with(scenario, name, parts[:begin] + parts[begin + size :])
            size //= 2
    for name in _PARTS:
        parts = getattr(scenario, name)
        for index, part in enumerate(parts):
            for shorter in _shorter(part):
                changed = (*parts[:index], shorter, *parts[index + 1 :])
                yield _with(scenario, name, changed)


def _with(scenario: Scenario, name: str, parts: tuple[Any, ...]) -> Scenario:
    changes: dict[str, Any] = {name: parts}
    return replace(scenario, **changes)


def _shorter(part: Any) -> Iterator[Any]:
    """Yields variants of a part, each smaller in one respect."""
    if getattr(part, "trigger", None) is not None:
        yield replace(part, trigger=None)
    if getattr(part, "time_s", 0.0) > 2 * _SHORTEST_S:
        yield replace(part, time_s=part.time_s / 2)
    if getattr(part, "max_tokens", 1) > 1:
        yield replace(part, max_tokens=part.max_tokens // 2)
    if len(getattr(part, "prompt", ())) > 1:
        yield replace(part, prompt=part.prompt[: len(part.prompt) // 2])
