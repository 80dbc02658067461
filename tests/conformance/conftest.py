from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.in_process_server import InProcessServer, start_in_process_server

collect_ignore = ["third_party"]
"""These tests run in a virtual environment of their own: `make judges`."""


@pytest.fixture(scope="package")
def in_process_server() -> Iterator[InProcessServer]:
    with start_in_process_server() as in_process_server:
        yield in_process_server
