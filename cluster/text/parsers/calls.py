"""One call of a tool, read while it is written."""

from __future__ import annotations

import re

from swell.cluster.text.parsers.matching import end_of
from swell.cluster.text.parsers.reading import NotRead, Reading, TextReader

MAX_NAME_CHARS = 256
"""Longest name of a tool or an argument; a longer text is no name. OpenAI's API allows 64."""


class Call(TextReader):
    """A format reads the call's name first, then its arguments as JSON text, which `take` gives
    from then on that the call is `known`."""

    name = ""
    id = ""
    """The id that the model wrote; empty: none."""
    known = False
    """It is a call, whatever follows."""

    def _run(
        self,
        pattern: re.Pattern[str],
        *,
        max_chars: int = MAX_NAME_CHARS,
        skip_space: bool = True,
    ) -> Reading[str]:
        """A name follows: characters of `pattern`, at least one and at most `max_chars`."""
        if skip_space:
            yield from self._next()
        run = ""
        while True:
            start, self._at = self._at, end_of(pattern, self._text, self._at)
            run += self._text[start : self._at]
            whole = self._at < len(self._text)
            if len(run) > max_chars or (whole and not run):
                raise NotRead(run if self.known else "")
            if whole:
                return run
            yield
