"""The documentation of the API in a browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from swell.cluster.api.openapi.document import openapi_document
from tests.conformance.in_process_server import InProcessServer
from tests.support.web.axe import needs_axe, violations
from tests.support.web.browser import Browser, needs_browser

pytestmark = [pytest.mark.slow, needs_browser]

OPERATIONS = [
    operation["operationId"]
    for methods in openapi_document()["paths"].values()
    for operation in methods.values()
]
EXAMPLES = [
    "post_v1_chat_completions",
    "post_v1_completions",
    "post_v1_messages",
    "post_v1_messages_count_tokens",
    "post_tokenize",
    "post_detokenize",
    "get_v1_models",
    "get_v1_models_model",
    "get_admin_cluster",
    "post_admin_scale",
    "post_admin_pause",
]


@pytest.fixture
def page(browser: Browser, in_process_server: InProcessServer) -> Iterator[Browser]:
    browser.open("about:blank")
    browser.open(f"{in_process_server.url}/docs")
    browser.until_text("#routes", "Answer a conversation")
    yield browser
    assert browser.log() == []


def test_every_route_is_listed_and_shown(page: Browser) -> None:
    script = "return [...document.querySelectorAll('#contents a')].map((one) => one.hash.slice(1))"
    assert sorted(page.run(script)) == sorted(OPERATIONS)
    for operation in OPERATIONS:
        page.run("location.hash = arguments[0]", operation)
        page.until(
            "return document.querySelector('#contents a[aria-current]')?.hash === arguments[0]",
            f"#{operation}",
        )
        assert page.text("#routes h3")


@pytest.mark.parametrize("operation", EXAMPLES)
def test_examples_run(page: Browser, operation: str) -> None:
    page.run("location.hash = arguments[0]", operation)
    page.until(
        "return document.querySelector('#contents a[aria-current]')?.hash === arguments[0]",
        f"#{operation}",
    )
    page.click(".try button")
    assert page.until_text(".try .meta", " after ").startswith("20")


def test_inner_types_open_one_after_the_other(page: Browser) -> None:
    page.click("#routes td summary")
    page.until("return document.querySelector('#routes td table')")


@needs_axe
def test_the_documentation_is_accessible(page: Browser) -> None:
    page.click(".try button")
    page.until_text(".try .meta", " after ")
    page.run("document.querySelectorAll('#routes details').forEach((one) => { one.open = true; })")
    assert violations(page) == []
