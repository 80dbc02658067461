"""Pages with generated tables: the text between two markers is replaced."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

END = "<!-- end -->\n"


def marker(name: str) -> str:
    """The line above a table."""
    return f"<!-- {name} -->\n"


def replace(path: Path, name: str, text: str) -> None:
    """Puts `text` between the marker of `name` and the next `<!-- end -->`. Raises ValueError if
    they are missing."""
    head, start, rest = path.read_text().partition(marker(name))
    _old, end, tail = rest.partition(END)
    if not start or not end:
        raise ValueError(f"{path} has no {marker(name).strip()!r} followed by {END.strip()!r}")
    path.write_text(f"{head}{start}{text}\n{end}{tail}")


def row(cells: Sequence[str]) -> str:
    """Returns one line of a table."""
    return f"| {' | '.join(cells)} |"
