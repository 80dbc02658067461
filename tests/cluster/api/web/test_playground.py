"""The playground in a browser, on a server in this process."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from swell.worker.wire import AsyncModelRunnerOutput, SchedulerOutput
from tests.conformance.in_process_server import (
    InProcessServer,
    start_in_process_server,
)
from tests.support.deadlines import HANG_S
from tests.support.web.axe import needs_axe, violations
from tests.support.web.browser import Browser, needs_browser

pytestmark = [pytest.mark.slow, needs_browser]

NAME = "<img src=x onerror=document.title='read'>"
"""The name of the model: markup."""
ANSWERS = ".answer[aria-busy=false]"


@pytest.fixture(scope="module")
def server() -> Iterator[InProcessServer]:
    with start_in_process_server(**{"model.name": NAME}) as started:
        yield started


@pytest.fixture
def page(browser: Browser, server: InProcessServer) -> Iterator[Browser]:
    browser.open("about:blank")
    browser.open(f"{server.url}/")
    browser.until("return document.querySelector('#model').value")
    fill(browser, temperature="0", seed="1", max_tokens="40")
    yield browser
    assert browser.log() == [], "neither errors nor violations of the policy"


def fill(page: Browser, **fields: str) -> None:
    script = """
        const field = document.querySelector(`[name=${arguments[0]}]`);
        field.value = arguments[1];
        field.dispatchEvent(new Event("input", {bubbles: true}));
    """
    for name, value in fields.items():
        page.run(script, name, value)


def ask(page: Browser, text: str, answers: int = 1) -> str:
    """Sends a message, and returns the text of its last answer."""
    before = page.run(f"return document.querySelectorAll('{ANSWERS}').length")
    page.type("#prompt", f"{text}\n")
    page.until(
        f"return document.querySelectorAll('{ANSWERS}').length === arguments[0]", before + answers
    )
    return page.text(".turn:last-child .answer:last-child .answer-text")


def test_a_first_visit_shows_the_model_and_the_state(page: Browser) -> None:
    assert page.run("return document.querySelector('#model').value") == NAME
    page.until_text("#health", "1 engine ready")
    assert page.run("return document.activeElement.id") == "prompt"


def test_a_chat_streams_and_keeps_its_history(page: Browser) -> None:
    assert ask(page, "upper: abc") == "ABC"
    assert "complete" in page.text(".answer .meta")
    assert "engine 0" in page.text(".answer .meta")
    ask(page, "upper: def")
    page.click("#as-code")
    code = page.text("#code-text")
    assert code.index("upper: abc") < code.index("ABC") < code.index("upper: def")
    page.click("#code-python")
    compile(page.text("#code-text"), "snippet", "exec")
    page.click("#clear")
    assert page.run("return document.querySelectorAll('.turn').length") == 0


def test_the_code_of_a_request_gets_the_same_answer(page: Browser) -> None:
    page.type("#prompt", 'upper: it\'s "a"')
    page.click("#as-code")
    command = page.text("#code-text")
    streamed = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    lines = [line.removeprefix("data: ") for line in streamed.stdout.splitlines()]
    chunks = [json.loads(line) for line in lines if line.startswith("{")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    text = "".join(delta.get("content") or "" for delta in deltas)
    page.click("#code-python")
    program = [sys.executable, "-c", page.text("#code-text")]
    printed = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    assert text == printed == ask(page, 'upper: it\'s "a"') != ""


def test_markup_in_an_answer_is_text(page: Browser) -> None:
    schema = {"properties": {"a": {"const": NAME}}, "required": ["a"]}
    schema |= {"type": "object", "additionalProperties": False}
    fill(page, schema=json.dumps(schema), max_tokens="200")
    assert json.loads(ask(page, NAME)) == {"a": NAME}
    assert page.run("return document.querySelectorAll('main img').length") == 0
    assert page.run("return document.title") == "Swell"


def test_stop_aborts_the_answer_and_frees_the_engine(
    page: Browser, server: InProcessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine waits after some tokens, so that the answer does not end before it is stopped."""
    execute, steps, stopped = server.executor.execute, count(), threading.Event()

    def wait_after_some(plan: SchedulerOutput) -> AsyncModelRunnerOutput:
        if next(steps) >= 30:
            stopped.wait(HANG_S)
        return execute(plan)

    monkeypatch.setattr(server.executor, "execute", wait_after_some)
    # A minimum length would end by itself after the longest answer of this model.
    fill(page, temperature="2", schema='{"type": "string", "minLength": 9999}')
    fill(page, max_tokens="")
    page.type("#prompt", "upper: abc\n")
    page.until("return document.querySelector('.answer-text')?.textContent.length > 3")
    page.click("#stop")
    page.until(f"return document.querySelector('{ANSWERS}')")
    assert "stopped by you" in page.text(".answer .meta")
    stopped.set()
    server.wait_idle()


def test_two_seeds_answer_in_parallel_and_one_continues(page: Browser) -> None:
    page.click("[name=compare]")
    fill(page, temperature="9", seed_b="7")
    ask(page, "upper: abc", answers=2)
    titles = page.run("return [...document.querySelectorAll('.answer h2')].map(e => e.innerText)")
    assert titles == ["Model, seed 1", "Model, seed 7"]
    texts = page.run("return [...document.querySelectorAll('.answer-text')].map(e => e.innerText)")
    assert texts[0] != texts[1]
    page.click(".answer:last-child > button")
    page.click("[name=compare]")
    fill(page, temperature="0")
    ask(page, "upper: def")
    page.click("#as-code")
    assert json.dumps(texts[1], ensure_ascii=False) in page.text("#code-text")


def test_tokens_show_their_probabilities(page: Browser) -> None:
    page.click("[name=logprobs]")
    assert ask(page, "upper: abc").startswith("ABC")
    page.click(".token")
    assert "Probability" in page.text(".token-detail")
    assert page.run("return document.querySelectorAll('.token-detail tbody tr').length") == 5


def test_the_results_of_tools_continue_the_conversation(page: Browser) -> None:
    page.run("document.querySelector('#example-tools').click()")
    fill(page, tool_choice="required", max_tokens="200")
    ask(page, "upper: abc")
    page.until_text(".answer .call", "get_weather(")
    page.click("#as-code")
    page.type(".call input", 'sunny, "21"')
    sent = json.loads(shlex.split(page.text("#code-text"))[-1])
    _, call, result = sent["messages"]
    assert result["content"] == 'sunny, "21"' and result["role"] == "tool"
    assert result["tool_call_id"] == call["tool_calls"][0]["id"]
    page.click("#code-python")
    compile(page.text("#code-text"), "snippet", "exec")
    page.click("#code-curl")
    fill(page, tools="", tool_choice="")
    page.type(".call input", "sunny\n")
    page.until(f"return document.querySelectorAll('{ANSWERS}').length === 2")
    assert "sunny" in page.text(".turn:last-child .said")
    assert page.run("return document.querySelector('.call input').disabled")
    assert "complete" in page.text(".turn:last-child .answer .meta")


def test_errors_are_shown_with_their_text(page: Browser) -> None:
    fill(page, top_p="9")
    page.type("#prompt", "hello\n")
    page.until_text(".answer .error", "top_p=9")
    page.log()  # the browser logs every answer that is not 2xx
    fill(page, temperature="hot")
    page.type("#prompt", "hello\n")
    page.until_text("#form-error", "temperature: hot is not a number")


def test_a_reload_forgets_the_key(browser: Browser, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-user\n")
    keys.chmod(0o600)
    with start_in_process_server(**{"serve.api_keys_file": str(keys)}) as server:
        browser.open(f"{server.url}/")
        browser.until_text("#key-dialog", "This server needs a key")
        browser.type("#key-dialog input", "wrong\n")
        browser.until_text("#key-dialog .error", "send a valid key")
        browser.type("#key-dialog input", "a-user\n")
        browser.until("return document.querySelector('#model').value")
        kept = "return [location.href, document.cookie, localStorage.length, sessionStorage.length]"
        assert browser.run(kept) == [f"{server.url}/", "", 0, 0]
        assert "a-user" not in browser.run("return document.documentElement.outerHTML")
        browser.open(f"{server.url}/")
        browser.until_text("#key-dialog", "This server needs a key")
        browser.run("document.querySelector('#key-dialog').close()")
        browser.until_text("#form-error", "send a valid key")
        browser.log()


@needs_axe
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_playground_is_accessible(page: Browser, scheme: str) -> None:
    page.set_media("prefers-color-scheme", scheme)
    page.click("[name=logprobs]")
    page.click("[name=compare]")
    ask(page, "upper: abc", answers=2)
    page.click(".token")
    page.click("#as-code")
    page.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert violations(page) == []
    page.set_media("prefers-color-scheme", "light")


def test_the_page_fits_a_phone(page: Browser) -> None:
    page.resize(390, 844)
    ask(page, "upper: abc")
    wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.run(wide) == 0
    page.resize(1280, 860)
