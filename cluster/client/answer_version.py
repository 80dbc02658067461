"""Which version of the weights gives an answer. Pure.

Law: all tokens of one answer, and all choices of one HTTP request, come from engines of one
version. An attempt that has given no token binds nothing once it has ended.
"""

from __future__ import annotations


class AnswerVersion:
    """Of all requests that together answer one HTTP request."""

    def __init__(self, begun: str | None = None) -> None:
        """`begun`: the version whose tokens the client has already; None: it has none."""
        self.version = begun
        """Of the engines that were chosen last; None: none was yet."""
        self._running = 0
        """Requests that have an engine now."""
        self._has_tokens = begun is not None

    @property
    def required(self) -> str | None:
        """The version of which an engine must be chosen; None: any."""
        return self.version if self._has_tokens or self._running else None

    @property
    def required_elsewhere(self) -> str | None:
        """The same for a request that would leave its engine."""
        return self.version if self._has_tokens or self._running > 1 else None

    def begin(self, version: str) -> None:
        """An attempt of one of them begins on an engine of this version."""
        assert self.required in (None, version), "an answer has one version"
        self.version = version
        self._running += 1

    def on_token(self) -> None:
        """One of them has got a token."""
        self._has_tokens = True

    def end(self) -> None:
        """An attempt has ended."""
        self._running -= 1
