from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.conformance.in_process_server import MODEL, InProcessServer, start_in_process_server
from tests.support.deadlines import HANG_S

MAX_MODEL_LEN = 2048
Post = Callable[..., httpx.Response]
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks all tests here as slow: a thousand requests take too long for `make test-fast`."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="package")
def in_process_server() -> Iterator[InProcessServer]:
    """Yields a server with room for tools and output schemas."""
    with start_in_process_server(**{"model.max_model_len": MAX_MODEL_LEN}) as in_process_server:
        yield in_process_server


@pytest.fixture(scope="package")
def client(in_process_server: InProcessServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{in_process_server.url}/v1", api_key="k", max_retries=0
    ) as client:
        yield client


@pytest.fixture(scope="package")
def claude(in_process_server: InProcessServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=in_process_server.url, api_key="k", timeout=HANG_S, max_retries=0
    ) as client:
        yield client


@pytest.fixture(scope="package")
def post(in_process_server: InProcessServer) -> Post:
    """Returns a function that sends a body to a path, with the model's name and temperature 0 by
    default."""

    def post(path: str, /, **body: Any) -> httpx.Response:
        plain = {} if "token" in path else {"temperature": 0}
        return in_process_server.client.post(path, json={"model": MODEL, **plain, **body})

    return post
