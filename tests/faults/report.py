"""The matrix as tables: in the terminal, as JSON, and between the markers of a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from swell.cluster.cli.console import print_table
from tests.faults.trial import Cell, seconds
from tests.support import marked_page

_HEAD = (
    "what",
    "when",
    "in flight",
    "answers",
    "failed",
    "wrong",
    "cut",
    "whole after",
    "next token p50",
    "p99",
    "longest pause",
    "",
)


class Result(msgspec.Struct, frozen=True):
    """All cells of one set-up; `problem` says what did not terminate cleanly."""

    setup: str
    settings: list[str]
    cells: list[Cell]
    problem: str | None = None

    @property
    def good(self) -> bool:
        return self.problem is None and all(cell.good for cell in self.cells)


def rows(cells: Sequence[Cell]) -> list[tuple[str, ...]]:
    """Returns a row for each cell, to go under the header."""
    return [
        (
            cell.fault,
            cell.moment,
            str(cell.in_flight),
            str(cell.result.answers),
            str(cell.result.failed),
            str(cell.result.wrong),
            str(cell.result.cut),
            seconds(cell.recover_s, "never"),
            seconds(cell.next_p50_s),
            seconds(cell.next_p99_s),
            seconds(cell.result.pause_s),
            "ok" if cell.good else "FAILED",
        )
        for cell in cells
    ]


def show(result: Result) -> None:
    print_table(result.setup, _HEAD, rows(result.cells), left=2)
    if result.problem:
        print(f"{result.setup}: {result.problem}")


def write_json(path: str, results: Sequence[Result]) -> None:
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")


def markdown(result: Result) -> str:
    """Returns a table with the settings above it."""
    lines = [f"`{' '.join(result.settings)}`", "", marked_page.row(_HEAD)]
    lines.append(marked_page.row(["---", "---", *["---:"] * (len(_HEAD) - 3), "---"]))
    lines += [marked_page.row(row) for row in rows(result.cells)]
    return "\n".join(lines)


def write_markdown(path: str, results: Sequence[Result]) -> None:
    """Writes each table between `<!-- NAME -->` and `<!-- end -->` of a page. Raises ValueError if
    these are missing."""
    for result in results:
        marked_page.replace(Path(path), result.setup, markdown(result))
