"""Values in error messages."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

SHOWN_CHARS = 80


def did_you_mean(name: str, known: Sequence[str], elsewhere: Sequence[str] = ()) -> str:
    """A hint at a known name that resembles an unknown one, or at the first of `elsewhere`; empty
    if there is none."""
    near = difflib.get_close_matches(name[:SHOWN_CHARS], known, n=1) or elsewhere
    return f"; did you mean {near[0]!r}?" if near else ""


def shown(value: object) -> str:
    """A value as an error message shows it: its repr, shortened. Of the outermost level at most
    three elements, so that no value is too large to show."""
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
