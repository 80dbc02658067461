"""The end of the application waits for Serve, but not forever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve

from swell.cluster import app
from swell.cluster.cli.start import application as module
from swell.cluster.cli.start.application import application
from swell.configs.schema import load

CONFIG = load({"model": {"path": "none"}})
HANDLE = object()


class FakeServe:
    """Serve, in which the named calls never return."""

    def __init__(self, *hanging: str) -> None:
        self.hanging = hanging
        self.calls: list[str] = []
        self.hangs = threading.Event()
        self.released = threading.Event()

    def now_s(self) -> float:
        """Returns the time of a clock that advances by an hour once a call hangs."""
        return time.monotonic() + 3600.0 * self.hangs.is_set()

    def call(self, name: str, answer: Any = None) -> Callable[..., Any]:
        def answered(*_arguments: Any, **_options: Any) -> Any:
            self.calls.append(name)
            if name in self.hanging:
                self.hangs.set()
                self.released.wait()
            return answer

        return answered


@pytest.mark.parametrize(
    ("hanging", "own_ray", "words"),
    [
        ("delete", True, "stopping Ray"),
        ("status", True, "stopping Ray"),
        ("shutdown", True, "stopping Ray"),
        ("status", False, "delete the application 'swell' there yourself"),
    ],
)
def test_an_unresponsive_serve_is_abandoned(
    monkeypatch: pytest.MonkeyPatch, hanging: str, own_ray: bool, words: str
) -> None:
    """A controller or a raylet hangs: stopping Ray with it."""
    fake, names = FakeServe(hanging), ["delete", "status", "shutdown"]
    status = type("Status", (), {"applications": {}})
    answers = {"start": None, "run_many": [HANDLE], "status": status}
    for name in ("start", "run_many", *names):
        monkeypatch.setattr(serve, name, fake.call(name, answers.get(name)))
    monkeypatch.setattr(app, "application", lambda config: None)
    monkeypatch.setattr(serve, "RunTarget", lambda *_arguments, **_options: None)
    clock = SimpleNamespace(monotonic=fake.now_s, sleep=time.sleep)
    monkeypatch.setattr(module, "time", clock)
    lines: list[str] = []
    try:
        with application(CONFIG, lines.append, threading.Event(), own_ray=own_ray) as ingress:
            assert ingress is HANDLE
    finally:
        fake.released.set()
    assert fake.calls == ["start", "run_many", *names[: names.index(hanging) + 1]]
    assert lines[-1] == f"Ray Serve has not answered for 60 s: {words}"
