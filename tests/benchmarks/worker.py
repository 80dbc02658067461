"""A contender that answers one line at a time, and is stopped in between."""

from __future__ import annotations

from collections.abc import Sequence

from tests.benchmarks.case import CONTENDERS, Setup
from tests.benchmarks.children import START_S, Child
from tests.benchmarks.interleaved import Numbers


class Worker:
    """A program of `contenders/`, in the interpreter of the peer with this name."""

    def __init__(self, name: str, script: str, arguments: Sequence[object], setup: Setup) -> None:
        self.name = name
        interpreter = setup.interpreter(name)
        assert interpreter is not None, f"no interpreter for {name}"
        command = [interpreter, str(CONTENDERS / script), *map(str, arguments)]
        self._child = Child(name, command, setup.logs, has_stdin=True)

    def start(self) -> None:
        self._child.start()
        self._child.receive(START_S)

    def turn(self) -> Numbers:
        return self._child.call()

    def pause(self) -> None:
        self._child.pause()

    def resume(self) -> None:
        self._child.resume()

    def close(self) -> None:
        self._child.close()
