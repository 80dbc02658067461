"""Contenders run in turn: A B C A B C ..., so that other load on the machine affects all of them.

Two contenders never compute at once: all except the one whose turn it is are paused, if they can
be.
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
        """Starts the contender, so that it is ready to measure. Raises ContenderFailed."""

    def pause(self) -> None:
        """Stops using the processor until `resume`."""

    def resume(self) -> None: ...

    def close(self) -> None:
        """Terminates all processes of the contender; may be called at any time."""


C = TypeVar("C", bound=Contender)


class Rounds(dict[str, list[Numbers]]):
    """The numbers of each contender: a list of rounds, all of the same length."""

    def series(self, name: str, key: str) -> list[float]:
        """Returns one number of a contender over the rounds; empty if the contender is missing."""
        return [numbers[key] for numbers in self.get(name, [])]

    def all_series(self, name: str) -> dict[str, list[float]]:
        """Returns all numbers of a contender, by their keys."""
        return {key: self.series(name, key) for key in (self.get(name) or [{}])[0]}


class InterleavedRounds(Generic[C]):
    """A context manager that starts contenders, and terminates all that have started.

    A peer that fails is left out from then on, and its problem is recorded; if ours fails,
    ContenderFailed is raised.
    """

    def __init__(self, contenders: Sequence[C]) -> None:
        self.active = list(contenders)
        self.problems: list[str] = []
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
        """Measures each contender `repeats` times, in turn."""
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
            self.problems.append(str(error).splitlines()[0])
            self.active.remove(contender)
            contender.close()


def log(text: str) -> None:
    """Prints progress, separate from the results."""
    print(text, file=sys.stderr, flush=True)
