"""Paths of a request's fields, as errors print them: `messages[3].content[0].text`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

Key = str | int
"""The name of a field, or the place in a list."""
PathNames = Callable[[str], str]
"""Our path of a field -> its path in the names of one API."""

MAX_PATH_CHARS = 1000
"""Of a path in an error: names of unknown fields may be long."""
_KEY = re.compile(r"\[(\d+)\]|(\[[^\[\]]*\]|[^.\[\]]+)")


def split_path(path: str) -> list[Key]:
    """A name in brackets that is no number is one key, with its brackets."""
    return [int(index) if index else name for index, name in _KEY.findall(path)]


def join_path(keys: Iterable[Key]) -> str:
    path = "".join(
        f"[{key}]" if isinstance(key, int) else key if key.startswith("[") else f".{key}"
        for key in keys
    )
    return path.removeprefix(".")


def rename_roots(names: Mapping[str, str]) -> PathNames:
    """Renames fields at the top of a request, and with them all that is in these."""

    def name_of(path: str) -> str:
        root = next(iter(split_path(path)), "")
        known = isinstance(root, str) and root in names
        return names[str(root)] + path[len(str(root)) :] if known else path

    return name_of
