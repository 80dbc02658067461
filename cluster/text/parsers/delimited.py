"""Calls whose arguments are JSON between the markers of their format."""

from __future__ import annotations

import re

from swell.cluster.text.parsers.calls import MAX_NAME_CHARS, MarkedCall
from swell.cluster.text.parsers.json_call import BareArguments

NAME = re.compile(rf"[^\s<>]{{0,{MAX_NAME_CHARS + 1}}}")


class DelimitedCall(MarkedCall):
    """A format reads the head, up to `_begin_arguments`."""

    ends: tuple[str, ...]
    """What follows the arguments."""
    fence = ""
    """First characters of those, at which arguments that a model forgot to close end."""

    def __init__(self) -> None:
        self._arguments: BareArguments | None = None
        self._read_run(NAME, self._end_word)

    def _end_word(self, word: str) -> None:
        """The first word of the head is `word`."""
        raise NotImplementedError

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
