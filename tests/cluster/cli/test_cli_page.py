"""`docs/reference/cli.md` lists every argument of every command, and what it means."""

from __future__ import annotations

from swell.cluster.cli.main import COMMANDS
from tests.cluster.cli.cli_page import NAME, PAGE, arguments, options
from tests.support import marked_page


def test_the_page_agrees_with_the_parsers() -> None:
    generated = f"{marked_page.marker(NAME)}{options()}\n{marked_page.END}"
    assert generated in PAGE.read_text(), "python -m tests.cluster.cli.cli_page"


def test_each_argument_has_a_help_text() -> None:
    found = {(name, one): text for name in COMMANDS for one, text in arguments(COMMANDS[name])}
    assert len(found) > 30
    assert [key for key, text in found.items() if not text] == []
