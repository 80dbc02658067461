"""Paths of a request's fields, as errors print them: `messages[3].content[0].text`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

Key = str | int
"""The name of a field, or an index in a list."""
PathNames = Callable[[str], str]
"""Maps our path of a field to its path in the names of one API."""

MAX_PATH_CHARS = 1000
"""Limit on the length of a path in an error: names of unknown fields may be long."""
_KEY = re.compile(r"\[(\d+)\]|(\[[^\[\]]*\]|[^.\[\]]+)")


def split_path(path: str) -> list[Key]:
    """Splits a path into keys. A name in brackets that is not a number is one key, including its
    brackets."""
    return [int(index) if index else name for index, name in _KEY.findall(path)]


def join_path(keys: Iterable[Key]) -> str:
    path = "".join(
        f"[{key}]" if isinstance(key, int) else key if key.startswith("[") else f".{key}"
        for key in keys
    )
    return path.removeprefix(".")


def rename_roots(names: Mapping[str, str]) -> PathNames:
    """Returns a function that renames top-level fields of a request in paths."""

    def name_of(path: str) -> str:
        root = next(iter(split_path(path)), "")
        known = isinstance(root, str) and root in names
        return names[str(root)] + path[len(str(root)) :] if known else path

    return name_of
