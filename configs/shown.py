"""Values in error messages."""

from __future__ import annotations

SHOWN_CHARS = 80


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
