"""Output of the demo: a live table on a terminal, else one line per response."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from rich import box
from rich.live import Live
from rich.table import Table

from swell.cluster.cli.console import plain, short

_SHOWN_ANSWERS = 12
"""Responses that are printed without a terminal; later ones are only counted."""
_WIDTH = 100


class StreamRow(Protocol):
    """The part of a response that is shown."""

    prompt: str
    text: str
    engines: str


class Screen:
    """Shows the running responses (`open`) in a table on a terminal, else the finished ones
    (`answers`) as lines. Other output appears above the table."""

    def __init__(
        self, live: Live | None, open: Mapping[int, StreamRow], answers: Sequence[StreamRow]
    ) -> None:
        self._live = live
        self._open = open
        self._answers = answers
        self._printed = 0

    def refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            return
        for answer in self._answers[self._printed : _SHOWN_ANSWERS]:
            prompt, text = plain(answer.prompt), short(plain(answer.text), _WIDTH)
            print(f"engine {answer.engines}: {prompt} -> {text}", flush=True)
            self._printed += 1

    def _table(self) -> Table:
        caption = f"{len(self._answers)} answers so far"
        table = Table(box=box.SIMPLE_HEAD, expand=True, caption=caption)
        for name in ("prompt", "answer"):
            table.add_column(name, no_wrap=True, ratio=1)
        table.add_column("engine", justify="right", width=6)
        for _, answer in sorted(self._open.items()):
            table.add_row(answer.prompt, answer.text, answer.engines)
        return table


@contextlib.contextmanager
def open_screen(open: Mapping[int, StreamRow], answers: Sequence[StreamRow]) -> Iterator[Screen]:
    """Open the screen that suits standard output."""
    terminal = sys.stdout.isatty()
    live = Live(auto_refresh=False, transient=True) if terminal else contextlib.nullcontext()
    with live as table:
        yield Screen(table, open, answers)
