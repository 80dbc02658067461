"""`docs/reference/configuration.md` lists every configuration key with its docstring."""

from __future__ import annotations

import msgspec

from tests.configs.configuration_page import PAGE, docstrings, page, sections


def test_the_page_agrees_with_the_docstrings() -> None:
    assert PAGE.read_text() == page(), "python -m tests.configs.configuration_page"


def test_each_key_has_a_docstring() -> None:
    """Otherwise the page could not say what the key means."""
    keys = {
        (name, field.name): docstrings(section).get(field.name)
        for name, section in sections()
        for field in msgspec.structs.fields(section)
    }
    assert len(keys) > 100
    assert [key for key, text in keys.items() if not text] == []
