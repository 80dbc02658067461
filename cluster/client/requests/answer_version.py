"""Version of the weights that produces an answer. Pure.

Invariant: all tokens of an answer, and all choices of one HTTP request, come from engines with the
same version. An attempt that ended without a token does not fix the version.
"""

from __future__ import annotations


class AnswerVersion:
    """The version of all requests that together answer one HTTP request."""

    def __init__(self, begun: str | None = None) -> None:
        """`begun` is the version of tokens that the client already has; None if it has none."""
        self.version = begun
        """The version of the engines chosen last; None if none was chosen yet."""
        self._running = 0
        """Number of requests that an engine runs now."""
        self._has_tokens = begun is not None

    @property
    def required(self) -> str | None:
        """The version that the next engine must have; None for any."""
        return self.version if self._has_tokens or self._running else None

    @property
    def required_elsewhere(self) -> str | None:
        """The version that another engine must have for a request that would leave its engine; None
        for any."""
        return self.version if self._has_tokens or self._running > 1 else None

    def begin(self, version: str) -> None:
        """Begins an attempt of one of the requests on an engine with this version."""
        assert self.required in (None, version), "an answer has one version"
        self.version = version
        self._running += 1

    def on_token(self) -> None:
        """Records that one of the requests got a token."""
        self._has_tokens = True

    def end(self) -> None:
        """Ends an attempt."""
        self._running -= 1
