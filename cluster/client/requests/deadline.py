"""Request timeouts that a client sets with a header."""

from __future__ import annotations

import math
from typing import NamedTuple

from swell.cluster.text.errors import BadRequest
from swell.configs.error_text import shown

HEADER = "x-request-timeout-s"
MAX_TIMEOUT_S = 86_400.0


class Deadline(NamedTuple):
    """The deadline of one request."""

    timeout_s: float
    """The timeout as the client sent it."""
    at_s: float
    """The time on the clock of the event loop: `timeout_s` after the request arrived."""


class RequestTimedOut(RuntimeError):
    """The answer was not complete within the client's timeout."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(
            f"the answer was not complete after {HEADER}={timeout_s:g} seconds; the request was "
            "aborted"
        )


def deadline_of(text: str | None, now_s: float) -> Deadline | None:
    """Returns the deadline of a request that arrives now, from its header, or None without one.
    Raises BadRequest."""
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:  # false for NaN
        raise BadRequest(
            f"the header {HEADER}={shown(text)} must be a number of seconds above 0, and at most "
            f"{MAX_TIMEOUT_S:g}",
            HEADER,
        )
    return Deadline(seconds, now_s + seconds)
