"""How the demonstration shows streams: a live table on a terminal, else one line an answer."""

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
"""Lines of answers without a terminal; later ones are only counted."""
_WIDTH = 100


class StreamRow(Protocol):
    """What is shown of an answer."""

    prompt: str
    text: str
    engines: str


class LineScreen:
    """Prints finished answers in their order."""

    def __init__(self, open: Mapping[int, StreamRow], answers: Sequence[StreamRow]) -> None:
        self._answers = answers
        self._printed = 0

    def note(self, text: str) -> None:
        print(text, flush=True)

    def refresh(self) -> None:
        for answer in self._answers[self._printed : _SHOWN_ANSWERS]:
            prompt, text = plain(answer.prompt), short(plain(answer.text), _WIDTH)
            print(f"engine {answer.engines}: {prompt} -> {text}")
            self._printed += 1
        sys.stdout.flush()


class LiveScreen:
    """Redraws the answers that are under way."""

    def __init__(
        self, live: Live, open: Mapping[int, StreamRow], answers: Sequence[StreamRow]
    ) -> None:
        self._live = live
        self._open = open
        self._answers = answers

    def note(self, text: str) -> None:
        self._live.console.print(text, highlight=False, markup=False)

    def refresh(self) -> None:
        table = Table(
            box=box.SIMPLE_HEAD, expand=True, caption=f"{len(self._answers)} answers so far"
        )
        for name in ("prompt", "answer"):
            table.add_column(name, no_wrap=True, ratio=1)
        table.add_column("engine", justify="right", width=6)
        for _, answer in sorted(self._open.items()):
            table.add_row(answer.prompt, answer.text, answer.engines)
        self._live.update(table, refresh=True)


@contextlib.contextmanager
def open_screen(
    open: Mapping[int, StreamRow], answers: Sequence[StreamRow]
) -> Iterator[LineScreen | LiveScreen]:
    """The screen that fits standard output; it reads `open` and `answers` at every refresh."""
    if not sys.stdout.isatty():
        yield LineScreen(open, answers)
        return
    with Live(auto_refresh=False, transient=True) as live:
        yield LiveScreen(live, open, answers)
