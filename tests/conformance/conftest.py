from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.house import House, open_house

collect_ignore = ["outside"]
"""Runs in a virtual environment of its own: `make judges`."""


@pytest.fixture(scope="package")
def house() -> Iterator[House]:
    with open_house() as house:
        yield house
