"""Writes the options of `docs/reference/cli.md` from the parsers of the command `swell`.

python -m tests.cluster.cli.cli_page
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from swell.cluster.cli.main import COMMANDS, Command
from tests.support import marked_page
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "reference" / "cli.md"
NAME = "options"
"""The name of the marker in the page."""
TABLE = ("| argument | meaning |", "|---|---|")


def options() -> str:
    """Returns a section for each command, with a table of its arguments."""
    return "\n\n".join(section(name, command) for name, command in COMMANDS.items())


def section(name: str, command: Command) -> str:
    rows = [marked_page.row(cells) for cells in arguments(command)]
    summary = f"{command.summary[0].upper()}{command.summary[1:]}."
    return "\n".join([f"### `swell {name}`", "", summary, "", *TABLE, *rows])


def arguments(command: Command) -> Iterator[tuple[str, str]]:
    """Yields the name and the meaning of each argument."""
    parser = argparse.ArgumentParser(add_help=False)
    command.arguments(parser)
    for action in parser._actions:
        value = "" if action.nargs == 0 else action.metavar or action.dest.upper()
        if isinstance(value, tuple):
            value = " ".join(value)
        if action.choices:
            value = ", ".join(map(str, action.choices))
        name = f"{action.option_strings[-1]} {value}" if action.option_strings else value
        yield f"`{name.strip()}`", (action.help or "").replace("|", "\\|")


if __name__ == "__main__":
    marked_page.replace(PAGE, NAME, options())
