"""Output of commands: tables, in ASCII if standard output is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1
) -> None:
    """Prints a table. The first `left` columns are text, the others numbers."""
    terminal = sys.stdout.isatty()
    table = Table(
        title=title or None,
        title_justify="left",
        box=box.SIMPLE_HEAD if terminal else box.ASCII2,
        safe_box=True,
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", no_wrap=index >= left)
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console(width=None if terminal else 120, highlight=False, markup=False).print(table)


def plain(text: str) -> str:
    """Returns text on one line, without control characters, and in ASCII if standard output is not
    a terminal."""
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return text if sys.stdout.isatty() else text.encode("ascii", "backslashreplace").decode()


def short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
