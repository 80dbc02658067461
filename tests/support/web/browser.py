"""A headless Chromium, controlled by the WebDriver protocol of chromedriver."""

from __future__ import annotations

import base64
import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.deadlines import HANG_S

_POLL_S = 0.05
_CHROMIUM, _DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    _CHROMIUM is None or _DRIVER is None,
    reason="chromium and chromedriver are not installed (Debian: chromium, chromium-driver)",
)
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The key of an element's id in the protocol."""


class Browser:
    """One window."""

    def __init__(self, client: httpx.Client, capabilities: dict[str, Any]) -> None:
        self._client = client
        made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        self._session = f"/session/{made['sessionId']}"

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = self._client.request(method, path, json=body)
        value = answer.json()["value"]
        assert answer.status_code == 200, value
        return value

    def open(self, url: str) -> None:
        self._call("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Returns the value that a script returns, also if it is a promise."""
        body = {"script": script, "args": list(arguments)}
        return self._call("POST", f"{self._session}/execute/sync", body)

    def resize(self, width: int, height: int) -> None:
        body = {"width": width, "height": height}
        self._call("POST", f"{self._session}/window/rect", body)

    def set_media(self, name: str, value: str) -> None:
        parameters = {"features": [{"name": name, "value": value}]}
        command = {"cmd": "Emulation.setEmulatedMedia", "params": parameters}
        self._call("POST", f"{self._session}/goog/cdp/execute", command)

    def until(self, script: str, *arguments: Any) -> Any:
        """Waits until the script returns a true value, and returns it."""
        end = time.monotonic() + HANG_S
        while not (value := self.run(script, *arguments)):
            assert time.monotonic() < end, f"{script}\nthe page shows:\n{self.text()}"
            time.sleep(_POLL_S)
        return value

    def text(self, selector: str = "body") -> str:
        """Returns the visible text of an element; empty if there is none."""
        found = self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)
        return str(found)

    def until_text(self, selector: str, wanted: str) -> str:
        script = "return document.querySelector(arguments[0])?.innerText.includes(arguments[1])"
        self.until(script, selector, wanted)
        return self.text(selector)

    def find(self, selector: str) -> str:
        body = {"using": "css selector", "value": selector}
        found: dict[str, str] = self._call("POST", f"{self._session}/element", body)
        return found[_ELEMENT]

    def click(self, selector: str) -> None:
        self._call("POST", f"{self._session}/element/{self.find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        """Replaces the text of a field as a person does, by keys."""
        place = f"{self._session}/element/{self.find(selector)}"
        self._call("POST", f"{place}/clear", {})
        self._call("POST", f"{place}/value", {"text": text})

    def save_picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", f"{self._session}/screenshot")))

    def log(self) -> list[str]:
        """Returns the errors that the console has shown since the last call."""
        entries = self._call("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries]

    def close(self) -> None:
        self._call("DELETE", self._session)


@contextlib.contextmanager
def start_browser(folder: Path) -> Iterator[Browser]:
    """Starts a browser with a profile in `folder`."""
    assert _CHROMIUM is not None and _DRIVER is not None
    command = [_DRIVER, "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        try:
            with httpx.Client(base_url=_address(driver), timeout=HANG_S) as client:
                browser = Browser(client, _capabilities(_CHROMIUM, folder))
                try:
                    yield browser
                finally:
                    browser.close()
        finally:
            driver.terminate()


def _address(driver: subprocess.Popen[str]) -> str:
    assert driver.stdout is not None
    for line in driver.stdout:
        if "started successfully on port" in line:
            return f"http://127.0.0.1:{line.split()[-1].rstrip('.')}"
    raise AssertionError("chromedriver does not start")


def _capabilities(chromium: str, folder: Path) -> dict[str, Any]:
    arguments = [
        "--headless=new",
        "--no-sandbox",  # the tests may run as root
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--no-first-run",
        "--window-size=1280,860",
        f"--user-data-dir={folder}",
    ]
    options = {"binary": chromium, "args": arguments}
    return {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
