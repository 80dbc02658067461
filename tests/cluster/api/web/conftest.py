"""One browser for all tests of the page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.in_process_server import InProcessServer, start_in_process_server
from tests.support.web.browser import Browser, start_browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with start_browser(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture(scope="session")
def in_process_server() -> Iterator[InProcessServer]:
    with start_in_process_server() as server:
        yield server
