"""`swell status` prints every problem that the admin API reports to operators."""

from __future__ import annotations

import itertools
from types import NoneType
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from msgspec import structs

from swell.cluster.api.admin.protocol import Accepted, ClusterState
from swell.cluster.cli import admin_commands
from swell.cluster.cli.main import main

TEXTS = ("error", "reason")
NUMBERS = ("failures", "next_try_s")
UNIQUE = itertools.count(1001)
BESIDE = {"autoscaling.last_decision.reason"}
"""Fields that only `GET /admin/cluster` shows, here the last autoscaling decision."""


def with_problems(kind: type, path: str = "") -> tuple[dict[str, Any], dict[str, str]]:
    """Returns a body in which everything is wrong that can be, and path -> text that `swell status`
    must print for it."""
    body: dict[str, Any] = {}
    shown: dict[str, str] = {}
    for field in msgspec.structs.fields(kind):
        place = f"{path}{field.name}"
        hint = get_type_hints(kind)[field.name]
        kinds = [hint, *get_args(hint)]
        struct = next((each for each in kinds if msgspec.inspect.is_struct_type(each)), None)
        if struct is not None:
            inner, texts = with_problems(struct, f"{place}.")
            body[field.name] = inner if list not in map(origin, kinds) else [inner]
            shown |= texts
        elif field.name in TEXTS:
            body[field.name] = shown[place] = f"problem of {place}"
        elif field.name in NUMBERS:
            body[field.name] = next(UNIQUE)
            shown[place] = str(body[field.name])
        elif field.required:
            body[field.name] = example(hint)
    return body, shown


def origin(hint: Any) -> Any:
    return getattr(hint, "__origin__", None)


def example(hint: Any) -> Any:
    if NoneType in get_args(hint):
        return None
    return {int: 1, float: 1.0, str: "name", bool: True}.get(hint, [])


def engine(rank: int, level: int, freed_bytes: int = 0, state: str = "active") -> dict[str, Any]:
    return {"rank": rank, "state": state, "sleep_level": level, "freed_bytes": freed_bytes}


def cluster(state: str, *engines: dict[str, Any]) -> ClusterState:
    body, _ = with_problems(ClusterState)
    return msgspec.convert({**body, "state": state, "engines": list(engines)}, ClusterState)


def switch(
    monkeypatch: pytest.MonkeyPatch, words: list[str], *states: ClusterState
) -> tuple[int, list[Any]]:
    """Runs a command against a cluster that reports these states in turn. Returns the exit code and
    the requests sent."""
    left, requested = list(states), list[Any]()

    class Fake:
        def __init__(self, *_arguments: object) -> None: ...

        async def post(self, *arguments: Any) -> Accepted:
            requested.append(arguments[0])
            return Accepted()

        async def get(self, *_arguments: object) -> ClusterState:
            return left.pop(0) if len(left) > 1 else left[0]

    monkeypatch.setattr(admin_commands, "Client", Fake)
    monkeypatch.setattr(admin_commands, "_POLL_S", 0.0)
    code = main(words)
    assert len(left) == 1, "it has asked until all was done"
    return code, requested


def test_sleep_shows_the_level_and_the_memory_that_each_engine_freed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, requested = switch(
        monkeypatch,
        ["sleep", "--level", "2"],
        cluster("serving", engine(0, 0), engine(1, 0)),
        cluster("paused", engine(0, 2, 3_210_000_000), engine(1, 1, 10)),
        cluster("paused", engine(0, 2, 3_210_000_000), engine(1, 2, 40_000_000)),
    )
    assert (code, requested) == (0, ["/admin/sleep"])
    printed = capsys.readouterr().out
    assert "level" in printed and "memory freed" in printed
    assert "3.21 GB" in printed and "0.04 GB" in printed and "KV cache" not in printed


def test_wake_ends_when_all_engines_are_awake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine that is leaving need not wake up."""
    code, requested = switch(
        monkeypatch,
        ["wake"],
        cluster("paused", engine(0, 2, 99), engine(1, 2, 99)),
        cluster("serving", engine(0, 0), engine(1, 2, 99)),
        cluster("changing", engine(0, 0), engine(1, 0, state="repairing")),
        cluster("serving", engine(0, 0), engine(1, 0), engine(2, 2, 99, "leaving")),
    )
    assert (code, requested) == (0, ["/admin/wake"])
    assert "awake" in capsys.readouterr().out


def test_an_engine_that_does_not_wake_up_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(admin_commands, "_SWITCH_S", 0.0)
    code, _ = switch(monkeypatch, ["wake"], cluster("serving", engine(0, 0), engine(7, 2)))
    assert code == 1
    assert "engines [7]" in capsys.readouterr().err


def test_every_error_and_reason_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body, shown = with_problems(ClusterState)
    state = msgspec.convert(body, ClusterState)

    class Fake:
        def __init__(self, *_args: object) -> None: ...

        async def get(self, *_args: object) -> ClusterState:
            return state

    monkeypatch.setattr(admin_commands, "Client", Fake)
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert len(shown) > 7, shown
    assert {place for place, text in shown.items() if text not in out} - BESIDE == set()


@pytest.mark.parametrize(("classes", "is_shown"), [(("a", "b", ""), True), (("a", "a", ""), False)])
def test_status_names_the_numerics_classes_if_they_differ(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    classes: tuple[str, ...],
    is_shown: bool,
) -> None:
    engines = [{**engine(rank, 0), "numerics": name} for rank, name in enumerate(classes)]
    switch(monkeypatch, ["status"], cluster("serving", *engines))
    line = "engines differ in the bits of their results: a, b"
    assert (line in capsys.readouterr().out.splitlines()) == is_shown


def test_status_names_the_files_with_the_state_of_engines_that_hung(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state = cluster("serving", engine(0, 0))
    switch(monkeypatch, ["status"], structs.replace(state, hang_reports=["host-a:/logs/1.txt"]))
    assert "the state of the engine then: host-a:/logs/1.txt" in capsys.readouterr().out
