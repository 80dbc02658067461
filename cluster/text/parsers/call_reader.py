"""Base class of readers of one tool call while it streams."""

from __future__ import annotations

import re

from swell.cluster.text.parsers.marker_search import end_of
from swell.cluster.text.parsers.text_reader import NotRead, Reading, TextReader

MAX_NAME_CHARS = 256
"""Maximum length of the name of a tool or an argument; a longer text is not a name. OpenAI's API
allows 64."""


class Call(TextReader):
    """Reader of one call. A format reads the call's name first, then its arguments as JSON text,
    which `take` returns as soon as the call is `known`."""

    name = ""
    id = ""
    """The id that the model wrote; empty if it wrote none."""
    known = False
    """Whether this is certainly a call, no matter what follows."""

    def _run(
        self,
        pattern: re.Pattern[str],
        *,
        max_chars: int = MAX_NAME_CHARS,
        skip_space: bool = True,
    ) -> Reading[str]:
        """Reads a name: characters of `pattern`, at least one and at most `max_chars`."""
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
