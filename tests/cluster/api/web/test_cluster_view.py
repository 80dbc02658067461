"""The view of the cluster in a browser, on a server in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from swell.cluster.api.admin.protocol import ClusterState, EngineState, WorkerState
from tests.conformance.in_process_server import (
    InProcessServer,
    Manager,
    start_in_process_server,
)
from tests.support.web.axe import needs_axe, violations
from tests.support.web.browser import Browser, needs_browser

pytestmark = [pytest.mark.slow, needs_browser]


def open_cluster(page: Browser, server: InProcessServer) -> None:
    page.open("about:blank")
    page.open(f"{server.url}/#cluster")


def test_the_page_requests_an_admin_key_when_it_first_needs_one(
    browser: Browser, tmp_path: Path
) -> None:
    """The page has it until it is reloaded, in its memory."""
    keys = tmp_path / "keys"
    keys.write_text("an-operator\n")
    keys.chmod(0o600)
    with start_in_process_server(**{"serve.admin_keys_file": str(keys)}) as server:
        browser.open(f"{server.url}/")
        browser.until("return document.querySelector('#model').value")
        assert browser.text("#key-dialog") == ""
        browser.click("#tab-cluster")
        browser.until_text("#key-dialog", "The cluster needs an operator's key")
        browser.type("#key-dialog input", "wrong\n")
        browser.until_text("#key-dialog .error", "send a valid key")
        browser.type("#key-dialog input", "an-operator\n")
        browser.until_text(".summary", "serving")
        browser.click("#pause")
        browser.until_text("#confirm", "until you resume")
        browser.click("#confirm-yes")
        browser.until("return !document.querySelector('#confirm')")
        kept = "return [location.href, document.cookie, localStorage.length, sessionStorage.length]"
        assert browser.run(kept) == [f"{server.url}/#cluster", "", 0, 0]
        assert "an-operator" not in browser.run("return document.documentElement.outerHTML")
        open_cluster(browser, server)
        browser.until_text("#key-dialog", "The cluster needs an operator's key")
        browser.open("about:blank")
        browser.log()  # the browser logs every answer that is not 2xx


def test_a_starting_engine_shows_the_share_of_its_phase(
    browser: Browser, in_process_server: InProcessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = Manager._describe

    def with_another_one(manager: Manager) -> ClusterState:
        state = describe(manager)
        workers = [WorkerState(rank=0, tensor=0, pipeline=0, pid=None, status="loading")]
        text = "loading weights, tensor 31 of 290, 50% of 16.4 GB"
        state.engines.append(EngineState(rank=1, state="starting", starting=text, workers=workers))
        return state

    monkeypatch.setattr(Manager, "_describe", with_another_one)
    open_cluster(browser, in_process_server)
    shown = browser.until_text("tr[data-rank='1']", "tensor 31 of 290, 50% of 16.4 GB")
    assert "starting" in shown and "0 loading" in shown


@pytest.mark.parametrize(
    ("path", "part", "text"),
    [("#cluster", ".summary", "serving"), ("docs", "#routes", "Answer a conversation")],
)
def test_the_page_fits_a_phone(
    browser: Browser, in_process_server: InProcessServer, path: str, part: str, text: str
) -> None:
    browser.resize(390, 844)
    browser.open("about:blank")
    browser.open(f"{in_process_server.url}/{path}")
    browser.until_text(part, text)
    wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert browser.run(wide) == 0
    browser.resize(1280, 860)


@needs_axe
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_dialogs_of_operators_are_accessible(
    browser: Browser, in_process_server: InProcessServer, scheme: str
) -> None:
    browser.set_media("prefers-color-scheme", scheme)
    open_cluster(browser, in_process_server)
    browser.until_text(".summary", "serving")
    browser.click("#sleep")
    browser.until_text("#confirm", "KV cache is freed")
    assert violations(browser) == []
    browser.set_media("prefers-color-scheme", "light")
