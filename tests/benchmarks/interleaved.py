"""Contenders take turns: A B C A B C ..., so that other load on the machine meets all of them.

Two never compute at once: all but the one at turn are paused, where possible.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from tests.benchmarks.children import ContenderFailed

OURS = "swell"

Numbers = Mapping[str, float]


class Contender(Protocol):
    name: str

    def start(self) -> None:
        """Start, and be ready to measure. Raises ContenderFailed."""

    def pause(self) -> None:
        """Use no processor until `resume`."""

    def resume(self) -> None: ...

    def close(self) -> None:
        """End all processes of it; may be called at any time."""


C = TypeVar("C", bound=Contender)


class Rounds(dict[str, list[Numbers]]):
    """The numbers of each contender: a list of rounds, all of the same length."""

    def series(self, name: str, key: str) -> list[float]:
        """One number of a contender over the rounds; empty without it."""
        return [numbers[key] for numbers in self.get(name, [])]

    def all_series(self, name: str) -> dict[str, list[float]]:
        """All numbers of a contender, by their keys."""
        return {key: self.series(name, key) for key in (self.get(name) or [{}])[0]}


class InterleavedRounds(Generic[C]):
    """Contenders from start to end: a context manager, which ends all that have started.

    A peer that fails is left out from there on, with its trouble; if ours fails, ContenderFailed is
    raised.
    """

    def __init__(self, contenders: Sequence[C]) -> None:
        self.active = list(contenders)
        self.troubles: list[str] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> InterleavedRounds[C]:
        with self._stack as stack:
            for contender in list(self.active):
                stack.callback(contender.close)
                log(f"starting {contender.name}")
                with self._recording_failure(contender):
                    contender.start()
                    contender.pause()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def take(self, repeats: int, measure: Callable[[C], Numbers]) -> Rounds:
        """Let each measure `repeats` times, in turn."""
        rounds = Rounds()
        for index in range(repeats):
            for contender in list(self.active):
                with self._recording_failure(contender):
                    contender.resume()
                    numbers = measure(contender)
                    contender.pause()
                    rounds.setdefault(contender.name, []).append(numbers)
                    shown = "  ".join(f"{key} {value:.4g}" for key, value in numbers.items())
                    log(f"round {index + 1}  {contender.name:14} {shown}")
        active = {contender.name for contender in self.active}
        return Rounds({name: rounds[name] for name in rounds if name in active})

    @contextlib.contextmanager
    def _recording_failure(self, contender: C) -> Iterator[None]:
        try:
            yield
        except ContenderFailed as error:
            if contender.name == OURS:
                raise
            log(str(error))
            self.troubles.append(str(error).splitlines()[0])
            self.active.remove(contender)
            contender.close()


def log(text: str) -> None:
    """Print progress, apart from the results."""
    print(text, file=sys.stderr, flush=True)
