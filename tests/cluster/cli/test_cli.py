"""Commands against a scripted server: their output and exit codes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any

import pytest

from swell.cluster.cli import http_client
from swell.cluster.cli import terminal_chat as chat
from swell.cluster.cli.child_process import descendants
from swell.cluster.cli.doctor import doctor_command
from swell.cluster.cli.http_client import Client
from swell.cluster.cli.main import COMMANDS, EXPECTED, main
from tests.cluster.fake_server import FakeServer, running
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with running() as server:
        yield server


def one_line(capsys: Capture) -> str:
    """Returns the error. Checks that it is one line without a traceback."""
    err = capsys.readouterr().err
    assert err.startswith("swell: ") and err.count("\n") == 1, err
    return err


def test_a_name_that_takes_too_long_to_resolve_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(http_client, "_CONNECT_S", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(1.0) or [])
    assert main(["status", "--url", "http://swell.invalid:8000"]) == 1
    assert "no connection after 0.1 s" in one_line(capsys)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert COMMANDS[command].summary in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["dance"],
        ["serve"],
        ["scale", "two"],
        ["serve", "m", "--set", "nonsense"],
        ["bench"],
        ["bench", "--url", "u", "--model", "m"],
        ["bench", "--url", "u", "--requests", "0"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "--help" in one_line(capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["status", "--url", "http://127.0.0.1:1"], "connection refused"),
        (["status", "--url", "nonsense://x"], "is not a URL"),
        (["scale", "-1"], "engines=-1"),
        (["scale", "2", "--drain-timeout", "nan"], "drain_timeout_s=nan"),
        (["drain", "-2"], "rank=-2"),
        (["serve", "none.yaml"], "cannot be read"),
        (["serve", "./nowhere"], "is not a folder"),
        (["serve", "./nowhere", "--port", "70000"], "serve.port"),
        (["serve", "./nowhere", "--set", "scheduler.rows=2"], "known keys there"),
        (["generate", "./nowhere", "hi"], "is not a folder"),
        (["chat", "http://127.0.0.1:1"], "connection refused"),
    ],
)
def test_errors_are_one_line(arguments: list[str], words: str, capsys: Capture) -> None:
    assert main(arguments) == 1
    assert words in one_line(capsys)


@pytest.mark.parametrize("place", EXPECTED)
def test_expected_errors_are_named_where_they_are_defined(place: str) -> None:
    kind = resolve_name(place)
    assert f"{kind.__module__}:{kind.__qualname__}" == place


def test_status_prints_the_cluster(fake: FakeServer, capsys: Capture) -> None:
    assert main(["status", "--url", fake.url]) == 0
    out = capsys.readouterr().out
    assert "epoch 3, 1 of 1 engines active" in out and "25%" in out
    assert main(["status", "--url", fake.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["engines"][0]["pid"] == 7


def test_scale_watches_until_idle(fake: FakeServer, capsys: Capture) -> None:
    fake.phases = ["prepare", "prepare", "commit", "idle"]
    assert main(["scale", "3", "--url", fake.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1].split(";")[0] for line in lines] == ["prepare", "commit", "idle"]
    assert "3 of 3 engines active" in lines[-1]


def test_a_failed_change_is_an_error(fake: FakeServer, capsys: Capture) -> None:
    fake.phases, fake.error = ["prepare", "failed"], "no more memory"
    assert main(["scale", "2", "--url", fake.url]) == 1
    assert "no more memory" in one_line(capsys)


def test_a_refused_change_is_an_error(fake: FakeServer, capsys: Capture) -> None:
    assert main(["scale", "9", "--url", fake.url]) == 1
    assert "400: engines=9" in one_line(capsys)


def test_drain_names_the_rank(fake: FakeServer, capsys: Capture) -> None:
    fake.engines, fake.phases = 2, ["drain", "idle"]
    assert main(["drain", "1", "--url", fake.url]) == 0
    assert "1 of 1 engines active" in capsys.readouterr().out


def test_another_server_is_recognised(fake: FakeServer, capsys: Capture) -> None:
    assert main(["status", "--url", f"{fake.url}/text"]) == 1
    assert "404" in one_line(capsys)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes `input` return the given lines, then raise EOFError."""

    def use(*given: str) -> None:
        left = iter(given)

        def read(prompt: str = "") -> str:
            try:
                return next(left)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", read)

    return use


def test_chat_streams_answers(fake: FakeServer, lines: Any, capsys: Capture) -> None:
    lines("hi", "", "again", "/clear", "new", "/quit", "never")
    assert main(["chat", fake.url, "--system", "Be brief.", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "ab ab ab \n" * 3
    roles = [[m["role"] for m in request["messages"]] for request in fake.requests]
    assert roles == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user"],
    ]
    assert fake.requests[1]["messages"][2]["content"] == "ab ab ab "
    assert fake.requests[0]["temperature"] == 0 and "max_tokens" not in fake.requests[0]


def test_a_failed_answer_leaves_the_conversation_as_it_was(fake: FakeServer, lines: Any) -> None:
    fake.fail_every = 1
    lines("hi")
    assert main(["chat", fake.url]) == 1
    conversation = chat.Conversation(Client(fake.url), "fake", None)
    with pytest.raises(RuntimeError, match="no engine"):
        conversation.send("hi")
    assert conversation.messages == []


def test_interrupting_an_answer_keeps_its_text_so_far(
    fake: FakeServer, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(self: chat.Conversation, parts: list[str]) -> None:
        parts.append("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(chat.Conversation, "_stream", interrupted)
    conversation = chat.Conversation(Client(fake.url), "fake", None)
    conversation.send("hi")
    assert [message["content"] for message in conversation.messages] == ["hi", "half"]
    assert "[stopped]" in capsys.readouterr().out


def test_interrupts_exit_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor_command, "doctor", interrupt)
    assert main(["doctor"]) == 130


MAX_HELP_MODULES = 200
"""Modules that `swell --help` may load: twice what it loads now, nearly all from Python's own
library."""


def test_help_is_quick_and_loads_nothing() -> None:
    code = (
        "import sys\n"
        "from swell.cluster.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(len(sys.modules))\n"
        "print(sorted({'ray', 'torch', 'transformers', 'aiohttp', 'rich'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules, heavy = run.stdout.splitlines()[-2:]
    assert heavy == "[]"
    assert int(modules) < MAX_HELP_MODULES


def test_the_console_script_and_the_module_are_the_same() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "swell.cluster", "scale"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2 and run.stderr.startswith("swell: ")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_descendants_are_found_at_any_depth() -> None:
    inner = f"import subprocess, sys; subprocess.run([{sys.executable!r}, '-c', 'input()'])"
    process = subprocess.Popen([sys.executable, "-c", inner], stdin=subprocess.PIPE)
    deadline = time.monotonic() + HANG_S
    while len(descendants(process.pid)) < 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(descendants(process.pid)) == 1
    assert process.pid in descendants(os.getpid())
    process.communicate(b"\n")
    assert process.pid not in descendants(os.getpid())
