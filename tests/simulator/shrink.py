"""A smaller scenario that still breaks a law: parts are left out, then those left are shortened."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.simulator.scenario import Scenario

_PARTS = ("requests", "faults", "operations")
_SHORTEST_S = 0.05


def kind_of(broken: str) -> str:
    """Which law, whoever broke it when: words without a digit. A smaller scenario may break another
    one, such as that of a cluster that is paused and not resumed."""
    return " ".join(word for word in broken.split() if not re.search(r"\d", word))


def shrink(scenario: Scenario, is_broken: Callable[[Scenario], bool]) -> Scenario:
    """The smallest one that is found; `is_broken` runs a scenario, and holds for the first one.
    No source of chance is shared, so that leaving a part out changes nothing about the others."""
    while True:
        smaller = next((each for each in _smaller(scenario) if is_broken(each)), None)
        if smaller is None:
            return scenario
        scenario = smaller


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Larger steps first: halves, single parts, then each part shorter."""
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
    """A part of any kind, each time with one thing less."""
    if getattr(part, "trigger", None) is not None:
        yield replace(part, trigger=None)
    if getattr(part, "time_s", 0.0) > 2 * _SHORTEST_S:
        yield replace(part, time_s=part.time_s / 2)
    if getattr(part, "max_tokens", 1) > 1:
        yield replace(part, max_tokens=part.max_tokens // 2)
    if len(getattr(part, "prompt", ())) > 1:
        yield replace(part, prompt=part.prompt[: len(part.prompt) // 2])
