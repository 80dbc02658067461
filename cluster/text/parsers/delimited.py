"""Calls whose arguments are JSON between the marks of their format."""

from __future__ import annotations

from swell.cluster.text.parsers.calls import MarkedCall
from swell.cluster.text.parsers.json_stream import BareArguments


class DelimitedArguments(MarkedCall):
    """A call whose arguments stand as JSON between texts that its format fixes. A format reads the
    head, up to `_begin_arguments`."""

    ends: tuple[str, ...]
    """What follows the arguments."""
    fence = ""
    """First characters of those, at which arguments that a model forgot to close end."""

    def __init__(self) -> None:
        super().__init__()
        self._arguments: BareArguments | None = None

    def _begin_arguments(self, _: str) -> None:
        self._arguments = BareArguments(self.name, self.fence)
        self._state = self._in_arguments

    def _in_arguments(self, text: str, at: int) -> int:
        arguments = self._arguments
        assert arguments is not None
        at = arguments.push(text, at)
        self.known = arguments.known
        if arguments.ended and not self.known:
            self._break("")
        elif arguments.ended:
            self._expect(dict.fromkeys(self.ends, self._end))
        return at

    def _end(self, _: str) -> None:
        self.ended = True

    def take(self) -> str:
        return "" if self._arguments is None else self._arguments.take()

    def flush(self) -> None:
        if self._arguments is not None:
            self._arguments.flush()
