"""Checks of single values that a checkpoint declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def refuse_values(config: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises `ValueError` for a key with a value that is not allowed. A missing key is allowed;
    strings are compared without case."""
    for key, values in allowed.items():
        value = config.get(key)
        plain = value.lower() if isinstance(value, str) else value
        if plain is not None and plain not in values:
            known = ", ".join(str(each) for each in values)
            raise ValueError(f"{key}={value!r} (supported: {known})")


def integer(config: Mapping[str, Any], key: str) -> int | None:
    """Returns the integer of a key; None if it is missing or null. Raises `ValueError`."""
    value = config.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise ValueError(f"{key}={value!r} (an integer is expected)")
    return value


def block_size(config: Mapping[str, Any], key: str) -> tuple[int, int] | None:
    """Returns the rows and columns of a block; None if the key is missing or null. Raises
    `ValueError`."""
    value = config.get(key)
    parts = value.split("x") if isinstance(value, str) else value
    if parts is None:
        return None
    try:
        rows, columns = (int(part) for part in parts)
    except (TypeError, ValueError):
        rows = columns = 0
    if min(rows, columns) < 1:
        raise ValueError(f"{key}={value!r} (two sizes are expected)")
    return rows, columns


def mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns the object of a key; an empty one if it is missing or null. Raises `ValueError`."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{key}={value!r} (an object is expected)")
    return value or {}
