from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.conformance.house import MODEL, House, open_house

MAX_MODEL_LEN = 2048
Post = Callable[..., httpx.Response]
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A thousand requests are nothing for `make test-fast`."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="package")
def house() -> Iterator[House]:
    """With room for tools and forms."""
    with open_house(**{"model.max_model_len": MAX_MODEL_LEN}) as house:
        yield house


@pytest.fixture(scope="package")
def client(house: House) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{house.url}/v1", api_key="k", max_retries=0) as client:
        yield client


@pytest.fixture(scope="package")
def claude(house: House) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=house.url, api_key="k", max_retries=0) as client:
        yield client


@pytest.fixture(scope="package")
def post(house: House) -> Post:
    """Sends a body to a path, with the model's name and temperature 0 unless it says others."""

    def post(path: str, /, **body: Any) -> httpx.Response:
        plain = {} if "token" in path else {"temperature": 0}
        return house.client.post(path, json={"model": MODEL, **plain, **body})

    return post
