"""Formats values and hints for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

SHOWN_CHARS = 80


def did_you_mean(name: str, known: Sequence[str], elsewhere: Sequence[str] = ()) -> str:
    """Suggests the known name that resembles an unknown one, or else the first of `elsewhere`.
    Returns an empty string if there is none."""
    near = difflib.get_close_matches(name[:SHOWN_CHARS], known, n=1) or elsewhere
    return f"; did you mean {near[0]!r}?" if near else ""


def shown(value: object) -> str:
    """Formats a value for an error message: its repr, shortened. A list or dict is shown in full
    only if it is flat and has at most three elements, so that a huge value costs nothing."""
    if isinstance(value, str | bytes) and len(value) > SHOWN_CHARS:
        return repr(value[:SHOWN_CHARS]) + "..."
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    if not isinstance(value, list | tuple | dict):
        text = repr(value)
        return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."
    parts = value.values() if isinstance(value, dict) else value
    if len(value) <= 3 and not any(isinstance(part, list | tuple | dict) for part in parts):
        text = repr(value)
        if len(text) <= SHOWN_CHARS:
            return text
    return f"an {'object' if isinstance(value, dict) else 'array'} of {len(value)}"
